"""How much a writer stores: a cleaner that is slow to come round grants enough until it does."""

from __future__ import annotations

from collections import deque


class Demand:
    """The bytes that were stored lately, and those that there was no room for. One task."""

    def __init__(self, window_s: float) -> None:
        """``window_s``: what was stored longer ago than that does not count, in seconds."""
        self._window_s = window_s
        self._taken: deque[tuple[float, int]] = deque()
        self._refused = 0

    def note(self, now: float, taken: int, refused: int) -> bool:
        """Note what was stored and refused since the last time. Returns whether any was."""
        if taken:
            self._taken.append((now, taken))
        while self._taken and now - self._taken[0][0] >= self._window_s:
            self._taken.popleft()
        if taken or refused:
            self._refused = refused  # whoever waits asks in each round: these are no sum
        return bool(taken or refused)

    def bytes(self) -> int:
        """Return how much would be stored within the window, if there were room."""
        return sum(size for _, size in self._taken) + self._refused
