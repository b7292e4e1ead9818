"""For how long a process is ready to run, and is not run: the machine runs others.

The kernel counts that for each thread, once it has run it: for one that is ready, and still has
not been run since the last look, the time between the two is added here.
"""

from __future__ import annotations

import os
import time
from typing import Final, NamedTuple

_NANOSECONDS: Final = 1e-9
_READ_BYTES: Final = 1024


class ThreadRuns(NamedTuple):
    """What the kernel says of a thread."""

    ran: tuple[int, int]  #: for how long, and how often it was begun
    delay_s: float  #: for which it waited before that
    is_ready: bool  #: runs, or waits to


class RunDelays:
    """Of one process. Where the kernel does not tell (``schedstat`` is missing), there are none."""

    def __init__(self, process: int | str = "self", *, every_s: float) -> None:
        """``every_s``: how seldom the kernel is asked: 20 us a thread, 300 on a busy machine."""
        self._threads = f"/proc/{process}/task"
        self._every_s = every_s
        self._looked_s = float("-inf")
        self._told: dict[str, tuple[tuple[int, int], float]] = {}  # as it ran, and its delay

    def look(self) -> float:
        """Return for how long, since the last look, one of its threads waited for a processor.

        They may have waited at the same time, so the longest wait counts, and not the sum.
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
            # What was added is told once: the kernel counts it too, as soon as the thread runs.
            self._told[name] = runs.ran, max(delay_s, told_s)
            waited_s = max(waited_s, delay_s - told_s)
        return min(waited_s, since_s)


def runs_of_threads(threads: str) -> dict[str, ThreadRuns]:
    """Return what the kernel says of each thread in a folder of ``/proc``, by its id."""
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
