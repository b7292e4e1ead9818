"""Measures how much a writer stores, so that a slow cleaner grants enough until its next round."""

from __future__ import annotations

from collections import deque


class Demand:
    """Bytes stored recently, and those that there was no room for. One task."""

    def __init__(self, window_s: float) -> None:
        """``window_s``: stores longer ago than this do not count, in seconds."""
        self._window_s = window_s
        self._taken: deque[tuple[float, int]] = deque()
        self._refused = 0

    def note(self, now: float, taken: int, refused: int) -> bool:
        """Note bytes stored and refused since the last call. Returns whether there were any."""
        if taken:
            self._taken.append((now, taken))
        while self._taken and now - self._taken[0][0] >= self._window_s:
            self._taken.popleft()
        if taken or refused:
            self._refused = refused  # a waiting store asks in each round: don't add them up
        return bool(taken or refused)

    def bytes(self) -> int:
        """Return how many bytes would be stored within the window, if there were room."""
        return sum(size for _, size in self._taken) + self._refused
