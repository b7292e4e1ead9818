"""A clock that stands still while this process is ready to run and the machine runs others.

A call that blocks its event loop computes or waits for something. On a busy machine the loop of a
sound backend stands still as well: its thread, or one that has the interpreter's lock, is ready to
run, and is not run.
"""

from __future__ import annotations

import time
from typing import Final

from kvtier.plugin_api.run_delays import RunDelays

LOOK_S: Final = 0.01
"""How seldom the kernel is asked: as exact as the clock has to be, for what it measures."""


class RunClock:
    """Seconds, without those for which a thread of this process waited for a processor.

    It may go back by ``LOOK_S``.
    """

    def __init__(self) -> None:
        self._waited_s = 0.0
        self._delays = RunDelays(every_s=LOOK_S)

    def __call__(self) -> float:
        """Return the time. To be called often: what passes between two calls is told apart."""
        self._waited_s += self._delays.look()
        return time.monotonic() - self._waited_s
