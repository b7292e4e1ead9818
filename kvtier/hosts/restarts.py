"""Decides how long a host waits after a broken life of its tier before it begins the next.

The first pause is short, since most lives break for a temporary reason: a process was killed, or a
filesystem was unavailable for a moment. Each further life that breaks soon doubles the pause, so
that a tier that can't run costs little; the longest is still short enough to wait for. A life that
lasted for a while resets the pause, however many broke before it.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

RESTART_PAUSE_S: Final = 1.0
"""The first pause."""

RESTART_PAUSE_S_MAX: Final = 10.0
"""The longest pause. Starting a process takes half a second of one core: 5 % of it at this pace."""

WAIT_FRACTION: Final = 0.75
"""Share of ``start_timeout_s`` that a process may wait for a place that another engine uses."""

WELL_S: Final = 10.0
"""Time for which a backend must have been open to reset the pause."""


class RestartPause:
    """The pauses between a tier's lives. Belongs to one thread."""

    def __init__(
        self,
        first_s: float = RESTART_PAUSE_S,
        longest_s: float = RESTART_PAUSE_S_MAX,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._clock = clock
        self._next_s = first_s
        self._opened_at: float | None = None

    @property
    def next_s(self) -> float:
        """How long to wait after a life that breaks now, in seconds."""
        opened_at = self._opened_at
        is_well = opened_at is not None and self._clock() - opened_at >= WELL_S
        return min(self._first_s if is_well else self._next_s, self._longest_s)

    def opened(self) -> None:
        """Note that a life begins: its backend is open."""
        self._opened_at = self._clock()

    def after_a_life(self) -> float:
        """Note that a life broke, or could not begin; return how long to wait, in seconds."""
        pause_s, self._opened_at = self.next_s, None
        self._next_s = min(2 * pause_s, self._longest_s)
        return pause_s
