"""Provides a clock that stops while this process is runnable and the machine runs others.

A call that blocks its event loop computes or waits for something. On a busy machine the loop of a
sound backend stops as well: its thread, or one that has the interpreter's lock, is ready to
run, and is not run.
"""

from __future__ import annotations

import time
from typing import Final

from kvtier.plugin_api.run_delays import RunDelays

LOOK_S: Final = 0.01
"""Shortest interval between looks at the kernel's counts: the precision that this clock needs."""


class RunClock:
    """Seconds, without those for which a thread of this process waited for a processor.

    It may go back by ``LOOK_S``.
    """

    def __init__(self) -> None:
        self._waited_s = 0.0
        self._delays = RunDelays(every_s=LOOK_S)

    def __call__(self) -> float:
        """Return the time. Call it often: the time between two calls is split by cause."""
        self._waited_s += self._delays.look()
        return time.monotonic() - self._waited_s
