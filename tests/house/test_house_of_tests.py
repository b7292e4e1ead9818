"""House rules of the tests themselves: none depends on how fast the machine is.

Such a test passes alone and fails beside other work. What waits for something
that must come waits for ``tests/support/patience.py``'s one constant; a clock is read
there, and nowhere else. What the soaks wait for is in ``stress/limits.py``.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from hypothesis import HealthCheck, settings
from sources import tree_of

if TYPE_CHECKING:
    from collections.abc import Iterable

TESTS = Path(__file__).resolve().parents[1]
FILES = sorted(TESTS.rglob("*.py"))
SOAKS = sorted((TESTS.parent / "stress").rglob("*.py"))
WAITS = {
    *("wait", "join", "acquire", "get", "communicate", "fail_after", "result", "Barrier"),
    *("close", "wait_until_ended", "select", "poll", "settimeout", "create_connection"),
}
"""Calls that may wait: a number of seconds, if given, must be ``PATIENCE_S``, or have a name."""

GIVES_NO_SECONDS = {"get", "Barrier", "create_connection"}  #: first, that is

MAY_READ_A_CLOCK = {
    "support/gate.py": "says how long the rest of `make test` takes",
    "support/patience.py": "waits for all others",
    "support/starvation.py": "says of a failure how long its process was not run",
    "rig/__main__.py": "runs for as long as it is told",
    "model/test_model.py": "runs for as long as it is told",
    "unit/runtime/test_hanging_storage.py": "moves a clock on once something hangs",
    "vllm/support/engine.py": "notes how long a round took, for people",
    "unit/tools/test_cli_interrupted.py": "prints how long a command took to end, for people",
}
MAY_SLEEP = {
    "support/starvation.py": "looks at the clock time and again, beside the tests",
    "unit/backends/disk/test_disk_crash.py": "kills at a random moment, and expects none",
    "vllm/engine/test_engine_features.py": "puts an engine to sleep, not a test",
}
MAY_COUNT = {
    "model/stepped_loop.py": "all that happens happens in it",
    "model/tier_rules.py": "as above",
    "rig/scenario.py": "as above: its threads are stepped too",
    "support/cell.py": "as above",
    "unit/backends/disk/test_disk_region_faults.py": "as above",
    "unit/backends/fs/bound/test_bound_protocol.py": "as above",
    "unit/backends/fs/bound/test_bound_simulation.py": "as above",
    "unit/backends/network/_inside.py": "what has not come by then is waited for",
    "unit/stress/test_pace.py": "nothing else runs",
    "stress/engine/resets.py": "vLLM refuses, as often as that: the fault is left out then",
}
COUNTED_MIN = 5000
"""A loop of so many rounds is an endless one that somebody wanted to end."""


def name_of(path: Path) -> str:
    """Return the path below ``tests``, or that of a soak's file."""
    folder = TESTS if path.is_relative_to(TESTS) else TESTS.parent
    return path.relative_to(folder).as_posix()


@cache
def calls_of(path: Path) -> list[tuple[str, ast.Call]]:
    """Return all calls in a file: the name that is called, without what is before the dot."""
    found = []
    for node in ast.walk(tree_of(path)):
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


def seconds_of(name: str, call: ast.Call) -> list[ast.expr]:
    """Return what a call is told of how long it may wait."""
    if name == "setsockopt":
        return call.args if "TIMEO" in ast.unparse(call) else []
    if name not in WAITS:
        return []
    given = [each.value for each in call.keywords if each.arg == "timeout"]
    if name == "select":
        return [*given, *call.args[3:]]
    return given if name in GIVES_NO_SECONDS else [*given, *call.args[:1]]


def places(found: Iterable[tuple[Path, ast.AST]]) -> list[str]:
    """Return where something was found, for people."""
    return [f"{name_of(path)}:{node.lineno}: {ast.unparse(node)[:80]}" for path, node in found]


def test_no_test_sleeps() -> None:
    """Long enough on one machine is too short on the next, and too long on all others."""
    sleeps = [
        (path, node)
        for path in FILES
        if name_of(path) not in MAY_SLEEP
        for name, node in calls_of(path)
        if name == "sleep" and not (node.args and ast.unparse(node.args[0]) == "0")
    ]
    assert not places(sleeps)


def test_no_test_waits_for_a_number_of_its_own() -> None:
    """It says PATIENCE_S, or nothing at all; a time that is to run out has a name that says so."""
    found = [
        (path, node)
        for path in (*FILES, *SOAKS)
        for name, node in calls_of(path)
        if any(map(is_a_while, seconds_of(name, node)))
    ]
    assert not places(found)


def test_no_test_counts_how_often_it_looks() -> None:
    """A number of looks is a number of seconds on some machine: ``patience.looks`` is none."""
    found = [
        (path, node)
        for path in (*FILES, *SOAKS)
        if name_of(path) not in MAY_COUNT
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.For) and is_counted(node.iter)
    ]
    assert not places(found)


def is_counted(loops_over: ast.expr) -> bool:
    """Tell whether a loop ends after so many rounds only because somebody has to end it."""
    if not isinstance(loops_over, ast.Call) or ast.unparse(loops_over.func) != "range":
        return False
    rounds = loops_over.args[-1]
    if isinstance(rounds, ast.Constant):
        return isinstance(rounds.value, int) and rounds.value >= COUNTED_MIN
    return ast.unparse(rounds).lower().endswith("s_max")


RUNTIMES = re.compile(r"\bkvtier\.(runtime|hosts)\b|\bopen_runtime\b")
PATIENT = "import _patient_limits"
MAY_HAVE_DEFAULTS = {
    "house/": "makes none",
    "package/": "has a wheel make one, without storage",
    "rig/": "has a clock of its own",
    "support/": "is imported by those who are patient",
    "unit/engine/test_facade.py": "makes none that starts",
}


def test_whoever_makes_a_runtime_is_patient() -> None:
    """A limit that serves users well is missed on a machine that does much else."""
    impatient = {
        name_of(path)
        for path in FILES
        if not name_of(path).startswith(tuple(MAY_HAVE_DEFAULTS))
        if RUNTIMES.search(path.read_text())
        if not any(PATIENT in each.read_text() for each in (path, *conftests_of(path)))
    }
    assert not impatient


def conftests_of(path: Path) -> list[Path]:
    """Return those whose fixtures a test file has, below ``tests``."""
    folders = [each for each in path.parents if each.is_relative_to(TESTS)]
    return [each / "conftest.py" for each in folders if (each / "conftest.py").exists()]


def test_no_test_reads_a_clock() -> None:
    """How long something took says how busy the machine was."""
    clocks = {"monotonic", "perf_counter", "process_time"}
    read = [
        (path, node)
        for path in FILES
        if name_of(path) not in MAY_READ_A_CLOCK
        for name, node in calls_of(path)
        if name in clocks
    ]
    assert not places(read)


def test_no_property_has_a_deadline() -> None:
    """The profile says so once (``tests/conftest.py``), and no test takes it back."""
    assert settings().deadline is None
    assert HealthCheck.too_slow in settings().suppress_health_check
    taken_back = []
    for path in FILES:
        for name, node in calls_of(path) if name_of(path) != "conftest.py" else ():
            given = {each.arg: ast.unparse(each.value) for each in node.keywords}
            off = given.get("suppress_health_check", "too_slow")  # given, it replaces the list
            is_off = "too_slow" in off or off == "list(HealthCheck)"
            if name == "settings" and ("deadline" in given or not is_off):
                taken_back.append((path, node))
    assert not places(taken_back)


def test_what_may_be_left_out_is_there() -> None:
    """An exception for a file that is gone would hide the next one of that name."""
    there = {name_of(path) for path in (*FILES, *SOAKS)}
    assert {*MAY_READ_A_CLOCK, *MAY_SLEEP, *MAY_COUNT} <= there
