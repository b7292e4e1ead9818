"""A clock that stands still while this process is ready to run and the machine runs others.

A call that blocks its event loop computes or waits for something. On a busy machine the loop of a
sound backend stands still as well: its thread, or one that has the interpreter's lock, is ready to
run, and is not run. The kernel counts for how long, for each thread.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final

LOOK_S: Final = 0.01
"""How seldom the kernel is asked: as exact as the clock has to be, for what it measures."""

_THREADS: Final = Path("/proc/self/task")
_NANOSECONDS: Final = 1e-9


class RunClock:
    """Seconds, without those for which a thread of this process waited for a processor.

    Where the kernel does not tell (``schedstat`` is missing), it is the monotonic clock. It may
    go back by ``LOOK_S``.
    """

    def __init__(self) -> None:
        self._waited_s = 0.0
        self._looked_s = float("-inf")
        self._delays_s: dict[str, float] = {}

    def __call__(self) -> float:
        """Return the time. To be called often: what passes between two calls is told apart."""
        now_s = time.monotonic()
        since_s = now_s - self._looked_s
        if since_s >= LOOK_S:
            before, self._delays_s = self._delays_s, _delays_s()
            # They may have waited at the same time, so the longest wait counts, and not the sum.
            waited_s = max(
                (delay_s - before.get(each, delay_s) for each, delay_s in self._delays_s.items()),
                default=0.0,
            )
            self._waited_s += min(waited_s, since_s)
            self._looked_s = now_s
        return now_s - self._waited_s


def _delays_s() -> dict[str, float]:
    """Return for how long each thread of this process has waited for a processor, by its id."""
    delays_s = {}
    for thread in _THREADS.iterdir():
        try:
            counted = (thread / "schedstat").read_text("ascii").split()
            delays_s[thread.name] = int(counted[1]) * _NANOSECONDS
        except (OSError, ValueError, IndexError):  # it has ended, or nothing is counted
            continue
    return delays_s
