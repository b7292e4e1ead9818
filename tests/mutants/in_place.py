"""Runs collected tests in one fork after the other, each of which changes a function first.

What has found a mutant most recently goes first for the next one, since neighbours are found by
the same tests; slow tests stay last. Tests that don't call the function are left out. When all
is done the tests are run once more in that order, without a change: a test that fails for its
place in the order would have found nothing.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import resource
import select
import signal
import sys
import tempfile
import traceback
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

import pytest
from _pytest.main import pytest_runtestloop as run_tests

from tests.mutants.rooms import SLOW
from tests.mutants.transplant import RunAtImportError, Transplant
from tests.mutants.watch import EVERY_TEST, CallWatch, Watch, what_was_told

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from tests.mutants.watch import Function

    Verdict = dict[str, str]

MEMORY_BYTES_MAX = 6 << 30
WALL_S_MAX = 1800
LEFT_OUT_MAX = 5
"""More tests than this don't fail because they are run in a fork."""

FIRST_MAX = 40
"""So many tests that have found something go first."""

OPTIONS = ("-x", "-q", "--tb=line", "-p", "no:cacheprovider", "--hypothesis-seed=1")
OPTIONS += ("-W", "ignore::pytest.PytestAssertRewriteWarning")
CODES = {0: "survived", 1: "tests", 2: "import"}
AT_IMPORT = "run at import"
"""In place of what killed it: this mutant can't be made in place."""


def verdicts(
    module: str, original: str, changed: Sequence[str], tests: Sequence[str], log: Path
) -> Iterator[Verdict]:
    """Yield for each changed source ``killed_by``, which may be "survived" or ``AT_IMPORT``.

    With it comes ``test``, the name of the first test that failed, if one did.
    """
    read_end, write_end = os.pipe()
    child = os.fork()
    if not child:
        os.close(read_end)
        driver = _Driver(module, original, changed, write_end)
        exit_with(lambda: _collect_and_drive(driver, tests, log))
    os.close(write_end)
    seen = 0
    with os.fdopen(read_end) as lines:
        for line in lines:
            verdict = json.loads(line)
            if "problem" in verdict:
                break
            if "left_out" in verdict:
                print(f"fail in a fork, and are left out: {verdict['left_out']}", flush=True)
            else:
                seen += 1
                yield verdict
        else:
            verdict = {"problem": "its driver ended"} if seen < len(changed) else {}
    os.waitpid(child, 0)
    if verdict.get("problem"):
        raise SystemExit(f"{module}: {verdict['problem']}\n{log.read_text(errors='replace')}")


def _collect_and_drive(driver: _Driver, tests: Sequence[str], log: Path) -> int:
    write_to(log)
    from hypothesis.internal.conjecture.engine import ConjectureRunner

    # That a property fails is all that is asked.
    ConjectureRunner.shrink_interesting_examples = lambda _self: None
    with tempfile.TemporaryDirectory(prefix="kvtier-mutants-", ignore_cleanup_errors=True) as place:
        code = int(pytest.main([*OPTIONS, f"--basetemp={place}/t", *tests], plugins=[driver]))
    if not driver.has_begun:
        driver.tell(problem="its tests can't be collected")
    return code


class _Tried(NamedTuple):
    """What became of one run of the tests."""

    killed_by: str
    failed: list[str]


class _Driver:
    """In place of pytest's loop over the tests: one such loop for each mutant."""

    def __init__(self, module: str, original: str, changed: Sequence[str], out: int) -> None:
        self.has_begun = False
        self._module, self._original, self._changed, self._out = module, original, changed, out
        self._first: list[str] = []  # names of tests, the latest that found something first
        self._seconds: dict[str, float] = {}  # what slow tests take
        self._callers: dict[Function, set[str]] = {}
        self._spawning: set[str] = set()

    def tell(self, **what: str) -> None:
        """Write what the driver's parent reads."""
        os.write(self._out, json.dumps(what).encode() + b"\n")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Try all mutants."""
        self.has_begun = True
        gc.freeze()
        module = importlib.import_module(self._module)
        if not self._begins(session):
            return True
        for changed in self._changed:
            try:
                transplant = Transplant(module, self._original, changed)
                tests = self._tests_of(transplant)
            except RunAtImportError:
                self.tell(killed_by=AT_IMPORT)
            else:
                tried = self._try(session, transplant, tests)
                self.tell(killed_by=tried.killed_by, test=" ".join(tried.failed))
        self._passes(session)
        return True

    def _begins(self, session: pytest.Session) -> bool:
        """Leave out tests that fail in a fork, which are few; learn what the others call."""
        maxfail, session.config.option.maxfail = session.config.option.maxfail, 0
        killed_by, failed = self._try(session, None, None, CallWatch)
        session.config.option.maxfail = maxfail
        if killed_by == "survived":
            return True
        if not 0 < len(failed) <= LEFT_OUT_MAX:
            self.tell(problem=f"its tests fail without a change ({killed_by}): {failed}")
            return False
        self.tell(left_out=" ".join(failed))
        session.items[:] = [item for item in session.items if item.nodeid not in failed]
        return self._passes(session)

    def _passes(self, session: pytest.Session) -> bool:
        tried = self._try(session, None, None)
        if tried.killed_by != "survived":
            self.tell(problem=f"its tests fail without a change: {tried.failed}")
        return tried.killed_by == "survived"

    def _tests_of(self, transplant: Transplant) -> set[str]:
        """Return the tests that may see the change."""
        tests = set().union(*(self._callers.get(each, set()) for each in transplant.functions))
        if not tests:
            raise RunAtImportError("an import may call it, and no test does")
        return tests | self._spawning

    def _try(
        self,
        session: pytest.Session,
        transplant: Transplant | None,
        tests: set[str] | None,
        *watches: type[CallWatch],
    ) -> _Tried:
        told = os.memfd_create("told")
        child = os.fork()
        if not child:
            exit_with(lambda: self._run(session, transplant, tests, told, *watches))
        in_time = wait(child, WALL_S_MAX)
        with suppress(ProcessLookupError):  # what it has left behind
            os.killpg(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        failed, seconds, callers, spawning = what_was_told(told)
        if failed:
            others = (each for each in self._first if each != failed[0])
            self._first = [failed[0], *others][:FIRST_MAX]
        self._seconds.update(seconds)
        self._callers.update(callers)
        self._spawning |= spawning
        return _Tried(killed_by(status, in_time=in_time), failed)

    def _run(
        self,
        session: pytest.Session,
        transplant: Transplant | None,
        tests: set[str] | None,
        told: int,
        *watches: type[CallWatch],
    ) -> int:
        os.setpgid(0, 0)
        if "vllm" not in self._module:  # which maps more than it uses
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES_MAX, MEMORY_BYTES_MAX))
        if tests is not None and EVERY_TEST not in tests:
            session.items[:] = [item for item in session.items if item.nodeid in tests]
        ranks = {name: rank for rank, name in enumerate(self._first)}
        session.items.sort(
            key=lambda item: (item.nodeid.startswith(SLOW), ranks.get(item.nodeid, FIRST_MAX))
        )
        plugins = session.config.pluginmanager
        plugins.register(Watch(told, None if transplant is None else self._seconds))
        for watch in watches:
            calls = watch(told, sys.modules[self._module].__file__ or "")
            plugins.register(calls)
            calls.begin()
        if transplant is not None:
            transplant.apply()
        with suppress(session.Failed):
            run_tests(session)
        return 1 if session.testsfailed else 0


def killed_by(status: int, *, in_time: bool) -> str:
    """Say what ended a mutant, given its process' status."""
    code = os.waitstatus_to_exitcode(status)
    if not in_time or code in (-signal.SIGALRM, -signal.SIGXCPU):
        return "no end"
    return CODES.get(code, f"exit {code}")


def wait(child: int, seconds: float) -> bool:
    """Tell whether the child ended in time."""
    ended = os.pidfd_open(child)
    in_time, _, _ = select.select([ended], [], [], seconds)
    os.close(ended)
    return bool(in_time)


def write_to(log: Path) -> None:
    """Send all that this process prints to a file."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)


def exit_with(run: Callable[[], int]) -> None:
    """Run it, and end the process: it must not go on as its parent does."""
    code = 3
    try:
        code = int(run())
    except BaseException:  # noqa: BLE001 - as above
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
