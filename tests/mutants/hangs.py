"""Ends a process whose tests never end: by what they did with the CPU, never by the clock.

A loop without an end uses CPU time, which the kernel limits. What waits for ever uses next to
none, and doesn't want any either. Tests on a busy machine want it all the time, and are let go on.
"""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
from contextlib import suppress
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

BUSY_FRACTION: Final = 0.1
"""Whoever wants the CPU for less of the time only polls for what never comes."""

CPU_S: Final = 5.0
"""So much CPU time any test may use."""

IDLE_S: Final = 30.0
"""So long a test may be idle, whatever it waits for: storage, or a process that starts."""


class HangWatch:
    """Ends this process, as a signal does, once its test loops or waits for ever. Main thread."""

    def __init__(self) -> None:
        self._wanted_s = self._interval_s = 0.0

    def begin(self, seconds: float) -> None:
        """Begin anew, for a test that takes so many seconds as it should be."""
        cpu_s_max = ceil(time.process_time() + CPU_S + 5 * seconds)
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_s_max, resource.RLIM_INFINITY))
        self._wanted_s, self._interval_s = wanted_s(), IDLE_S + 10 * seconds
        signal.signal(signal.SIGALRM, self._look)
        signal.setitimer(signal.ITIMER_REAL, self._interval_s, self._interval_s)

    def _look(self, *_: object) -> None:
        before_s, self._wanted_s = self._wanted_s, wanted_s()
        wanted = self._wanted_s - before_s
        # Who waits for the CPU just now is told of only once it has it.
        if wanted < BUSY_FRACTION * self._interval_s and not _others_want_it_now():
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.raise_signal(signal.SIGALRM)


def wanted_s() -> float:
    """Return for how long this process and its children had the CPU, or waited for it."""
    own = resource.getrusage(resource.RUSAGE_CHILDREN)  # of those that have ended
    return own.ru_utime + own.ru_stime + sum(map(_wanted_by, _with_children(os.getpid())))


def _others_want_it_now() -> bool:
    """Tell whether any thread but this one, which looks, runs or waits to run."""
    here = threading.get_native_id()
    for process in _with_children(os.getpid()):
        with suppress(OSError):  # it ends meanwhile
            for thread in Path(f"/proc/{process}/task").iterdir():
                state = (thread / "stat").read_text().rpartition(")")[2].split()[0]
                if state == "R" and thread.name != f"{here}":
                    return True
    return False


def _wanted_by(process: int) -> float:
    nanoseconds = 0
    with suppress(OSError):  # it ends meanwhile
        for thread in Path(f"/proc/{process}/task").iterdir():
            had, waited, _ = (thread / "schedstat").read_text().split()
            nanoseconds += int(had) + int(waited)
    return nanoseconds / 1e9


def _with_children(process: int) -> Iterator[int]:
    yield process
    with suppress(OSError):
        for thread in Path(f"/proc/{process}/task").iterdir():
            for child in (thread / "children").read_text().split():
                yield from _with_children(int(child))
