"""The command as a whole: its versions, what it needs, and that it asks before everything goes."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvtier import __version__
from kvtier.tools.cli import check
from kvtier.tools.cli.exit_status import BAD_INPUT, INTERRUPTED, UNREAD
from tests.unit.backends.disk._disk import open_disk

if TYPE_CHECKING:
    from tests.unit.tools._shell import Shell

BLOCKS = 12
ROOT = Path(__file__).parents[3]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a disk tier's folder with blocks in it."""

    async def fill() -> None:
        async with open_disk(tmp_path / "kv") as disk:
            await disk.store(*range(BLOCKS))
            await disk.come_to_rest()

    asyncio.run(fill())
    return tmp_path / "kv"


def on_a_terminal(answer: str, *arguments: str) -> tuple[int, str]:
    """Run ``python -m kvtier`` on a terminal of its own; return its status and what it printed."""
    ours, theirs = pty.openpty()
    try:
        os.write(ours, answer.encode())
        run = subprocess.run(
            [sys.executable, "-m", "kvtier", *arguments],
            stdin=theirs,
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        os.close(ours)
        os.close(theirs)
    return run.returncode, run.stdout + run.stderr


@pytest.mark.parametrize("answer", ["n\n", "\n", "\x04", "what?\n"])
def test_purge_of_all_asks_on_a_terminal_and_takes_only_yes(
    answer: str, folder: Path, kvtier: Shell
) -> None:
    status, text = on_a_terminal(answer, "purge", str(folder), "--all")
    assert status == 1
    for part in ("Remove everything", str(folder), f"{BLOCKS} blocks", "nothing was removed"):
        assert part in text
    assert kvtier("ls", folder)["blocks"] == BLOCKS


@pytest.mark.parametrize(("answer", "options"), [("y\n", ()), ("", ("--yes",))])
def test_purge_of_all_removes_when_it_may(
    answer: str, options: tuple[str, ...], folder: Path, kvtier: Shell
) -> None:
    """In a script it doesn't ask: ``golden`` has no question."""
    status, text = on_a_terminal(answer, "purge", str(folder), "--all", *options)
    assert status == 0
    assert ("[y/N]" in text) is (not options)
    assert f"removed: {BLOCKS} blocks" in text
    assert kvtier("ls", folder)["blocks"] == 0


def test_the_version_stands_in_one_place_which_a_clone_has_too() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["dynamic"] == ["version"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "kvtier.__version__"}


def sized_into(stdout: int | None, folder: Path, unbuffered: str = "") -> tuple[int, str]:
    """Run a command; return its status and stderr. ``stdout`` None: closed."""
    shell = ["/bin/sh", "-c", 'exec "$@"' + " >&-" * (stdout is None), "sh"]
    command = ["size", "--layers", "2", "--kv-heads", "2", "--head-dim", "64"]
    paths = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    run = subprocess.run(
        [*shell, sys.executable, "-m", "kvtier", *command],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env={**os.environ, **paths, "PYTHONUNBUFFERED": unbuffered},
        check=False,
    )
    return run.returncode, run.stderr


def test_a_reader_that_has_had_enough_is_no_fault(tmp_path: Path) -> None:
    ours, its = os.pipe()
    os.close(ours)
    ended = sized_into(its, tmp_path)
    os.close(its)
    assert ended == (UNREAD, "")


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_behind_stdout_is_said_and_is_no_fault_that_was_found(
    unbuffered: str, tmp_path: Path
) -> None:
    with Path("/dev/full").open("w") as full:
        ended = sized_into(full.fileno(), tmp_path, unbuffered)
    said = "kvtier size: stdout cannot be written: No space left on device.\n"
    assert ended == (BAD_INPUT, said)


@pytest.mark.parametrize("encoding", ["ascii:strict", "latin-1:strict", "utf-8:strict"])
def test_a_name_that_stdout_cannot_encode_is_shown_with_escapes(
    encoding: str, tmp_path: Path
) -> None:
    trace = tmp_path / "\udcff\u4f60.jsonl"
    trace.write_text('{"time_s": 1, "tokens": 16, "output_tokens": 1, "blocks": [1]}\n')
    command = ["replay", str(trace), "--policies", "lru"]
    paths = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    run = subprocess.run(
        [sys.executable, "-m", "kvtier", *command],
        capture_output=True,
        env={**os.environ, **paths, "PYTHONIOENCODING": encoding},
        check=False,
    )
    assert (run.returncode, run.stderr) == (0, b"")
    assert rb"Hit ratio of \udcff" in run.stdout


def test_a_trace_may_come_from_stdin(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "kvtier", "replay", "-", "--policies", "lru"],
        input=b'{"time_s": 1, "tokens": 16, "output_tokens": 1, "blocks": [1]}\n',
        capture_output=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        cwd=tmp_path,
        check=False,
    )
    assert (run.returncode, run.stderr) == (0, b"")
    assert b"Hit ratio of stdin" in run.stdout


def test_a_closed_stdout_gets_nothing(tmp_path: Path) -> None:
    assert sized_into(None, tmp_path) == (0, "")


def test_the_version_names_kvtier_python_and_vllm(kvtier: Shell) -> None:
    line = kvtier.shown("--version")
    assert line.startswith(f"kvtier {__version__} (Python 3.")
    assert "vllm" in line.lower()


def test_ctrl_c_that_no_command_catches_is_told_and_is_no_success(
    monkeypatch: pytest.MonkeyPatch, kvtier: Shell
) -> None:
    def interrupted(_path: str) -> dict[str, object]:
        raise KeyboardInterrupt

    monkeypatch.setattr(check, "read_config", interrupted)
    kvtier.shown("check", "any.json", status=INTERRUPTED)
    assert kvtier.err == "kvtier check: interrupted\n"


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("stauts", "status"),
        ("--verison", "--version"),
        ("bench teir", "tier"),
        ("ls --jsno x PLACE", "--json"),
        ("replay x --verify ful", "full"),
        ("size --layers 1 --kv-heads 1 --head-dim 1 --dtype bflaot16", "bfloat16"),
        ("--show-completion bahs", "bash"),
        ('fsck {"type":"dsik"}', "disk"),
        ('bench tier --tier {"type":"reids"}', "redis"),
        ("replay TRACE --dram 1MiB --tier dsik:PLACE:1GiB", "disk"),
        ("replay TRACE --policies lur", "lru"),
    ],
)
def test_a_misspelt_command_option_or_value_is_answered_with_what_was_meant(
    given: str, meant: str, tmp_path: Path, kvtier: Shell
) -> None:
    request = {"time_s": 1, "tokens": 16, "output_tokens": 1, "blocks": [1]}
    (tmp_path / "trace").write_text(json.dumps(request))
    places = {"PLACE": str(tmp_path), "TRACE": str(tmp_path / "trace")}
    words = [re.sub("PLACE|TRACE", lambda found: places[found[0]], each) for each in given.split()]
    assert re.search(rf"(?i)did you mean ['\"]?{meant}['\"]?\?", kvtier.refused(*words))


@pytest.mark.parametrize(
    "given", ["check --conect", "doctor host:1 --prob", "check kv.json --json --connect"]
)
def test_an_option_is_never_taken_for_a_file(given: str, kvtier: Shell) -> None:
    """Where a file may be -, for stdin or stdout, what begins with it came through."""
    option = given.rsplit(maxsplit=1)[-1]
    assert f"{option} is no option here" in kvtier.refused(*given.split())


CONFIG = '{"spec_name": "KVTierOffloadingSpec", "secondary_tiers": [{"type": "disk"}]}'


@pytest.mark.parametrize(
    ("code", "heavy"),
    [
        ("import kvtier.tools.cli.bench", ("vllm", "torch", "numpy", "rich", "matplotlib")),
        ("main(['ls', '--help'])", ("vllm", "numpy", "kvtier_backends")),
        ("main(['check', 'kv.json'])", ("vllm", "torch")),
        ("import kvtier.tools.bench.tier", ("vllm", "torch", "obstore", "valkey", "mooncake")),
    ],
)
def test_a_command_imports_only_what_it_needs(
    code: str, heavy: tuple[str, ...], tmp_path: Path
) -> None:
    """It answers in a second, and on a machine that lacks what it does not need."""
    (tmp_path / "kv.json").write_text(CONFIG)
    program = (
        f"import sys; sys.path[:0] = {sys.path!r}; from kvtier.tools.cli.main import main\n{code}\n"
        f"print([each for each in {heavy!r} if each in sys.modules])"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert run.stdout.splitlines()[-1] == "[]"
