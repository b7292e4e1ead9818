"""The mutation tool's own rules: its files and tests are there, its changes are made."""

from __future__ import annotations

import ast
import importlib.util
import os
import signal
import subprocess
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.mutants.rooms import ROOMS
from tests.mutants.transplant import RunAtImportError, Transplant

if TYPE_CHECKING:
    from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
EXPLAINED = ROOT / "tests/mutants/explained.txt"


@pytest.mark.parametrize("file", ROOMS)
def test_each_file_and_its_tests_are_there(file: str) -> None:
    """A file that was renamed would be mutated no more, and a test run on nothing."""
    assert (ROOT / file).is_file()
    for test in ROOMS[file]:
        path, _, name = test.partition("::")
        assert not name or name.partition("[")[0] in functions_of(path), test
        assert (ROOT / path).exists(), test


@cache
def functions_of(path: str) -> set[str]:
    """Return the functions of a test file."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    body = ast.parse((ROOT / path).read_text()).body
    return {node.name for node in body if isinstance(node, kinds)}


def test_each_survivor_that_is_explained_has_a_reason_and_is_in_its_file() -> None:
    """Else it explains nothing, or the next mutant of that text by chance."""
    for line in EXPLAINED.read_text().splitlines():
        if not line.startswith("#"):
            file, changed, reason = line.split(" | ")
            assert reason
            before = changed.split(" + ")[0].removeprefix("- ")
            source = " ".join((ROOT / file).read_text().split())
            assert " ".join(before.split(" - ")[0].split()) in source, line


BEFORE = """
from functools import cached_property
LIMIT = 1
HELD = lambda box: box.held

def doubled(number: int, by: int = 2) -> int:
    return number * by

class Box:
    kind = "plain"

    def __init__(self, held: int) -> None:
        self.held = held

    @property
    def more(self) -> int:
        return self.held + 1

    @staticmethod
    def text() -> str:
        return "box"

    @cached_property
    def sums(self) -> list[int]:
        return [each + self.held for each in range(2)]

    def counter(self):
        return lambda: self.held + 5
"""


@pytest.fixture
def module(tmp_path: Path) -> ModuleType:
    """Return a module that is imported already."""
    path = tmp_path / "before.py"
    path.write_text(BEFORE)
    spec = importlib.util.spec_from_file_location("before", path)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


@pytest.mark.parametrize(
    ("old", "new", "asked", "answer"),
    [
        ("number * by", "number + by", "doubled(5)", 7),
        ("self.held = held", "self.held = -held", "Box(3).held", -3),
        ("self.held + 1", "self.held - 1", "Box(3).more", 2),
        ('"box"', '"lid"', "Box(3).text()", "lid"),
        ("each + self.held", "each * self.held", "Box(3).sums", [0, 3]),
        ("self.held + 5", "self.held + 6", "Box(3).counter()()", 9),
    ],
)
def test_a_function_that_is_there_takes_the_changed_code(
    module: ModuleType, old: str, new: str, asked: str, answer: object
) -> None:
    """Else a mutant would survive because nothing had changed."""
    before = eval(asked, vars(module))
    Transplant(module, BEFORE, BEFORE.replace(old, new)).apply()
    assert eval(asked, vars(module)) == answer != before


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("LIMIT = 1", "LIMIT = 2"),
        ("by: int = 2", "by: int = 3"),
        ('kind = "plain"', 'kind = "odd"'),
        ("@staticmethod", "@classmethod"),
        ("box.held", "box.kind"),
        ("# nothing", "# nothing"),
    ],
)
def test_what_an_import_runs_is_left_to_an_import(module: ModuleType, old: str, new: str) -> None:
    """A mutant that is not made must not count as one that survived."""
    with pytest.raises(RunAtImportError):
        Transplant(module, BEFORE, BEFORE.replace(old, new)).apply()


MODULE = """
def doubled(number):
    return number * 2

def _at_import():
    return 3

THREE = _at_import()

def unseen(number):
    return number * 4
"""
TESTS = """
import part

def test_first():
    assert part.unseen(0) == 0

def test_second():
    assert part.doubled(5) == 10
    assert part.THREE == 3
"""
DRIVE = """
import sys
from pathlib import Path
from tests.mutants.in_place import verdicts
place, original = Path(sys.argv[1]), Path(sys.argv[1], "part.py").read_text()
changes = [("2", "3"), ("number * 4", "number * 5"), ("return 3", "return 4"), ("2", "2")]
changed = [original.replace(*each) for each in changes]
for verdict in verdicts("part", original, changed, [str(place / "test_part.py")], place / "log"):
    print(verdict["killed_by"], verdict.get("test", "").rpartition(":")[2])
"""


def test_each_mutant_has_its_own_verdict(tmp_path: Path) -> None:
    """Also what no test could see in place, since it was run as the module was imported."""
    (tmp_path / "part.py").write_text(MODULE)
    (tmp_path / "test_part.py").write_text(TESTS)
    ended = subprocess.run(
        [sys.executable, "-c", DRIVE, tmp_path],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert [line.strip() for line in ended.stdout.splitlines()] == [
        "tests test_second",
        "survived",
        "run at import",
        "run at import",
    ]


HANG = """
import sys
from tests.mutants import hangs
hangs.CPU_S, hangs.IDLE_S = 1.5, 0.3
hangs.HangWatch().begin(0)
exec(sys.argv[1])
"""
SPIN = "import time; end = time.monotonic() + {}\nwhile time.monotonic() < end: pass"
SPIN_FOR_TWO_LOOKS = SPIN.format(1)
# The kernel counts whole seconds of what a process has used since it began.
LOOP = "hangs.CPU_S = 0.1\nhangs.HangWatch().begin(0)\nwhile True: pass"
# Looked at less often: on a busy machine a process may wait for its disk while it starts.
CHILD = f"""
hangs.CPU_S, hangs.IDLE_S = 60, 1.5  # its child has that limit too
hangs.HangWatch().begin(0)
import subprocess; subprocess.run([sys.executable, "-c", {SPIN.format(1.6)!r}], check=True)
"""


@pytest.mark.parametrize(
    ("test", "status"),
    [
        (LOOP, -signal.SIGXCPU),
        ("import threading; threading.Event().wait()", -signal.SIGALRM),
        pytest.param(
            "import time\nwhile True: time.sleep(0.05)", -signal.SIGALRM, marks=pytest.mark.long
        ),
        ("import subprocess; subprocess.run(['sleep', 'infinity'])", -signal.SIGALRM),
        pytest.param(SPIN_FOR_TWO_LOOKS, 0, marks=pytest.mark.long),
        pytest.param(CHILD, 0, marks=pytest.mark.long),
    ],
)
def test_what_never_ends_is_ended_and_what_is_busy_is_not(test: str, status: int) -> None:
    """A mutant that hangs is found by that; one that only took long survives, as it must.

    Three of these are not in the gate: on a machine that is busy with other things, what polls
    wants the CPU as often as what works, what spins is not always seen to, and a child that starts
    wants it as seldom as what hangs.
    """
    command = [sys.executable, "-c", HANG, test]
    with subprocess.Popen(command, cwd=ROOT, start_new_session=True) as process:
        assert process.wait() == status
        with suppress(ProcessLookupError):  # what it has started
            os.killpg(process.pid, signal.SIGKILL)
