"""What tests tell while they run: which failed, which are slow, and which call what.

They write it to a file in memory, which their parent reads once they have ended, however.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from tests.mutants.hangs import HangWatch

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from types import CodeType, FrameType

Function = tuple[str, int]
"""A function's qualified name, and its first line."""

EVERY_TEST = "*"
"""Calls a function of which a fixture has made use that several tests share."""

SLOW_S = 0.5
"""What takes longer than this is told with its time."""

SPAWNS = ("os.fork", "os.posix_spawn", "subprocess.Popen")


class Told(NamedTuple):
    """What a process' tests have told."""

    failed: list[str]  #: tests
    seconds: dict[str, float]  #: what slow tests take
    callers: dict[Function, set[str]]  #: the tests that call each function
    spawning: set[str]  #: tests with processes of their own, whose calls are not known


class Watch:
    """Tells which test failed, or was slow; ends the process where a test takes far too long."""

    def __init__(self, out: int, seconds: Mapping[str, float] | None = None) -> None:
        """``seconds``: what slow tests take without a change. None: there is no limit."""
        self._out = out
        self._seconds = seconds
        self._hangs = HangWatch()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Begin to count."""
        if self._seconds is not None:
            self._hangs.begin(self._seconds.get(nodeid, SLOW_S))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Tell of the test."""
        if report.failed:
            tell(self._out, "failed", report.nodeid)
        elif report.when == "call" and report.duration > SLOW_S and self._seconds is None:
            tell(self._out, "seconds", report.nodeid, report.duration)


class CallWatch:
    """Tells which functions of one file each test calls, and which tests spawn processes."""

    def __init__(self, out: int, path: str) -> None:
        self._out, self._path = out, path
        self._called: set[CodeType] = set()
        self._spawns = False

    def begin(self) -> None:
        """Look at all calls from now on."""
        sys.addaudithook(self._audit)
        threading.settrace(self._trace)
        sys.settrace(self._trace)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Tell what a test called, with its fixtures."""
        self._called, self._spawns = set(), False
        ended = yield
        self._tell(item.nodeid)
        if self._spawns:
            tell(self._out, "spawns", item.nodeid)
        return ended

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Iterator[None]:
        """Take what a fixture calls that several tests share as called by all."""
        before, self._called = self._called, set()
        made = yield
        if fixturedef.scope != "function":
            self._tell(EVERY_TEST)
        self._called |= before
        return made

    def _trace(self, frame: FrameType, _event: str, _of_it: object) -> None:
        if frame.f_code.co_filename == self._path:
            self._called.add(frame.f_code)

    def _audit(self, event: str, _of_it: object) -> None:
        self._spawns |= event in SPAWNS

    def _tell(self, name: str) -> None:
        functions = [(each.co_qualname, each.co_firstlineno) for each in self._called]
        tell(self._out, "calls", name, functions)


def tell(out: int, *what: object) -> None:
    """Write what ``what_was_told`` reads."""
    os.write(out, json.dumps(what).encode() + b"\n")


def what_was_told(out: int) -> Told:
    """Return what a process' tests have written, and close the file."""
    told = Told([], {}, {}, set())
    os.lseek(out, 0, os.SEEK_SET)
    with os.fdopen(out, "rb") as lines:
        for line in lines:
            what, name, *of_it = json.loads(line)
            if what == "failed":
                told.failed.append(name)
            elif what == "seconds":
                told.seconds[name] = of_it[0]
            elif what == "spawns":
                told.spawning.add(name)
            else:
                for function in of_it[0]:
                    told.callers.setdefault(tuple(function), set()).add(name)
    return told
