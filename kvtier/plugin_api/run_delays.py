"""Measures how long a process is ready to run but not running, because the machine runs others.

The kernel counts that for each thread, but only once the thread runs. For a thread that is ready,
but has not run since the last look, the time since then is added here.
"""

from __future__ import annotations

import os
import time
from typing import Final, NamedTuple

_NANOSECONDS: Final = 1e-9
_READ_BYTES: Final = 1024


class ThreadRuns(NamedTuple):
    """The kernel's counts for a thread."""

    ran: tuple[int, int]  #: for how long, and how often it was scheduled
    delay_s: float  #: how long it waited before that
    is_ready: bool  #: runs, or waits to


class RunDelays:
    """Run delays of one process. There are none if the kernel has no ``schedstat``."""

    def __init__(self, process: int | str = "self", *, every_s: float) -> None:
        """``every_s``: shortest interval between looks: 20 us per thread, 300 on a busy machine."""
        self._threads = f"/proc/{process}/task"
        self._every_s = every_s
        self._looked_s = float("-inf")
        self._told: dict[str, tuple[tuple[int, int], float]] = {}  # as it ran, and its delay

    def look(self) -> float:
        """Return how long one of its threads has waited for a processor since the last look.

        They may have waited at the same time, so the longest wait counts, not the sum.
        """
        now_s = time.monotonic()
        since_s = now_s - self._looked_s
        if since_s < self._every_s:
            return 0.0
        self._looked_s = now_s
        before, self._told = self._told, {}
        waited_s = 0.0
        for name, runs in runs_of_threads(self._threads).items():
            ran, told_s = before.get(name, (None, runs.delay_s))
            is_kept = runs.is_ready and runs.ran == ran
            delay_s = told_s + since_s if is_kept else runs.delay_s
            # Time added here is reported once: the kernel counts it too, when the thread runs.
            self._told[name] = runs.ran, max(delay_s, told_s)
            waited_s = max(waited_s, delay_s - told_s)
        return min(waited_s, since_s)


def runs_of_threads(threads: str) -> dict[str, ThreadRuns]:
    """Return the kernel's counts for each thread in a folder of ``/proc``, by its id."""
    try:
        names = os.listdir(threads)  # noqa: PTH208 - this runs in the scheduler's thread
    except OSError:  # the process has ended
        return {}
    runs = {}
    for name in names:
        try:
            ran, delay, begun = _read(f"{threads}/{name}/schedstat").split()
            state = _read(f"{threads}/{name}/stat").rpartition(b")")[2].split()[0]
            counted = (int(ran), int(begun)), int(delay) * _NANOSECONDS
        except (OSError, ValueError, IndexError):  # it has ended, or nothing is counted
            continue
        runs[name] = ThreadRuns(*counted, state == b"R")
    return runs


def _read(path: str) -> bytes:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.read(descriptor, _READ_BYTES)
    finally:
        os.close(descriptor)
