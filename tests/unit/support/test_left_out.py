"""What a machine lacks is left out by name, with what to do; in CI it fails."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from requirements.debian import Package, packages
from tests.support import gate
from tests.support.gate import Ended, Part, Run, left_out, table
from tests.support.needs import NEEDS
from tests.support.patience import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Sequence

REPOSITORY = Path(__file__).parents[3]
LACKS_SOMETHING = """
from tests.support import needs

needs.NEEDS["thing"] = ("a thing", lambda: "apt-get install thing")

@needs.needs("thing")
def test_marked(): raise AssertionError

def test_calls():
    needs.require("thing")
    raise AssertionError

@needs.needs()
def test_has_all(): pass

def test_needs_nothing(): pass
"""


@pytest.fixture
def run_tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sequence[str]:
    """Return the command that runs these tests as the part of a gate, in ``tmp_path``."""
    (tmp_path / "test_lacking.py").write_text(LACKS_SOMETHING)
    monkeypatch.setattr(gate, "RESULTS", tmp_path)
    options = ["-q", "-p", "tests.conftest", "--junitxml", f"{tmp_path}/odd.xml", "-c", os.devnull]
    return [sys.executable, "-m", "pytest", *options, f"{tmp_path}/test_lacking.py"]


def run(command: Sequence[str], **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=REPOSITORY,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_user_is_told_what_was_left_out_and_what_to_install(run_tests: Sequence[str]) -> None:
    done = run(run_tests, CI="true", KVTIER_TEST_LEAVE_OUT="1")
    assert done.returncode == 0, done.stdout
    assert "2 passed, 2 skipped" in done.stdout
    shown = table(left_out([Part("odd", 1)]))
    assert "2 tests, needs a thing. To run them: apt-get install thing" in shown
    assert "2 test_lacking.py" in shown


def test_ci_leaves_nothing_out(run_tests: Sequence[str]) -> None:
    done = run(run_tests, CI="true", KVTIER_TEST_LEAVE_OUT="0")
    assert done.returncode == 1
    assert "apt-get install thing" in done.stdout
    assert "2 passed" in done.stdout
    assert not left_out([Part("odd", 1)])


def test_a_package_is_missing_if_its_program_is() -> None:
    assert Package("odd", "no-such-program", "a test").is_missing()
    assert not Package("coreutils", "ls", "all").is_missing()
    assert all(each.needed_by for each in packages())


def test_each_need_is_met_or_says_what_to_do() -> None:
    for what, remedy in NEEDS.values():
        assert what
        ways = "run as root", "apt-get install ", "install NVIDIA's "
        assert remedy() == "" or remedy().startswith(ways), what


def test_parts_run_after_those_that_they_need_and_none_begins_after_one_failed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = [Part("second", 1, after="first"), Part("first", 1), Part("bad", 1), Part("last", 1)]
    began = []

    def play(part: Part) -> Ended:
        began.append(part.name)
        return Ended(int(part.name == "bad"), 1.0, f"of {part.name}\n")

    monkeypatch.setattr(gate, "run", play)
    monkeypatch.setattr(gate, "AT_ONCE", 1)
    assert Run(parts[:2]).play()
    assert began == ["first", "second"]
    began.clear()
    assert not Run(parts).play()
    assert began == ["first", "second", "bad"]
    assert "of bad\n== bad FAILED in 1 s (3 of 4 parts, about 1 s left)" in capsys.readouterr().out


def test_as_many_parts_as_it_says_run_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No fewer, or none would pass the barrier; and no more."""
    together = threading.Barrier(gate.AT_ONCE)

    def play(_part: Part) -> Ended:
        together.wait(PATIENCE_S)
        return Ended(0, 1.0, "")

    monkeypatch.setattr(gate, "run", play)
    assert Run([Part(f"{number}", 1) for number in range(2 * gate.AT_ONCE)]).play()
    lines = capsys.readouterr().out.splitlines()
    changes = [line.endswith(" begins") - (" passed in " in line) for line in lines]
    assert max(itertools.accumulate(changes)) == gate.AT_ONCE
