"""House rules of the tests themselves: none depends on how fast the machine is.

Such a test passes alone and fails beside other work. What waits for something
that must come waits for ``tests/support/patience.py``'s one constant; a clock is read
there, and nowhere else.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

TESTS = Path(__file__).resolve().parents[1]
FILES = sorted(TESTS.rglob("*.py"))
WAITS = {"wait", "join", "acquire", "get", "communicate", "fail_after", "result", "Barrier"}
"""Calls that may wait: a number of seconds, if given, must be ``PATIENCE_S``."""

MAY_READ_A_CLOCK = {
    "support/patience.py": "waits for all others",
    "support/starvation.py": "says of a failure how long its process was not run",
    "rig/__main__.py": "runs for as long as it is told",
    "model/test_model.py": "runs for as long as it is told",
    "mutants/hangs.py": "ends a mutant that runs far longer than the code does",
    "unit/runtime/test_hanging_storage.py": "moves a clock on once something hangs",
    "unit/runtime/test_hung_backends.py": "gives up on a method that nobody calls",
    "vllm/support/engine.py": "notes how long a round took, for people",
}
MAY_SLEEP = {
    "support/starvation.py": "looks at the clock time and again, beside the tests",
    "unit/backends/disk/test_disk_crash.py": "kills at a random moment, and expects none",
    "unit/backends/disk/test_disk_purge.py": "gives a purge time to end that must not",
}


def name_of(path: Path) -> str:
    """Return the path below ``tests``."""
    return path.relative_to(TESTS).as_posix()


def calls_of(path: Path) -> list[tuple[str, ast.Call]]:
    """Return all calls in a file: the name that is called, without what is before the dot."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            called = node.func
            if isinstance(called, ast.Attribute):
                found.append((called.attr, node))
            elif isinstance(called, ast.Name):
                found.append((called.id, node))
    return found


def is_a_while(node: ast.expr) -> bool:
    """Tell whether this is a number of seconds that a fast machine may be too slow for."""
    is_number = isinstance(node, ast.Constant) and type(node.value) in (int, float)
    return is_number and node.value != 0  # type: ignore[attr-defined] # no number, no value


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_no_test_sleeps(path: Path) -> None:
    """Long enough on one machine is too short on the next, and too long on all others."""
    sleeps = [
        node.lineno
        for name, node in calls_of(path)
        if name == "sleep" and not (node.args and ast.unparse(node.args[0]) == "0")
    ]
    assert not sleeps or name_of(path) in MAY_SLEEP


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_no_test_waits_for_a_number_of_its_own(path: Path) -> None:
    """It says PATIENCE_S, or nothing at all."""
    found = []
    for name, node in calls_of(path):
        timeouts = [each.value for each in node.keywords if each.arg == "timeout"]
        seconds = node.args[:1] if name in WAITS - {"get", "Barrier"} else []
        if name in WAITS and any(map(is_a_while, [*timeouts, *seconds])):
            found.append(f"{name_of(path)}:{node.lineno}: {ast.unparse(node)}")
    assert not found


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_no_test_reads_a_clock(path: Path) -> None:
    """How long something took says how busy the machine was."""
    clocks = {"monotonic", "perf_counter", "process_time"}
    read = [node.lineno for name, node in calls_of(path) if name in clocks]
    assert not read or name_of(path) in MAY_READ_A_CLOCK


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_no_property_has_a_deadline(path: Path) -> None:
    """The profile says so once (``tests/conftest.py``), and no test takes it back."""
    assert settings().deadline is None
    assert HealthCheck.too_slow in settings().suppress_health_check
    if name_of(path) == "conftest.py":
        return
    for name, node in calls_of(path):
        if name != "settings":
            continue
        given = {each.arg: ast.unparse(each.value) for each in node.keywords}
        assert "deadline" not in given, node.lineno
        off = given.get("suppress_health_check", "too_slow")  # given, it replaces the list
        assert "too_slow" in off or off == "list(HealthCheck)", node.lineno


def test_what_may_be_left_out_is_there() -> None:
    """An exception for a file that is gone would hide the next one of that name."""
    assert {*MAY_READ_A_CLOCK, *MAY_SLEEP} <= {name_of(path) for path in FILES}
