"""Computes an engine's work in the last minute, or hour, from its readings."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtier.tools.watching.readings import EngineReading


class Window:
    """The last ``length_s`` seconds of one engine. Readings ``apart_s`` apart are remembered."""

    def __init__(self, length_s: float, apart_s: float = 0.0) -> None:
        self._length_s = length_s
        self._apart_s = apart_s
        self._readings: deque[EngineReading] = deque()  # the oldest first

    def add(self, now: EngineReading) -> EngineReading:
        """Add a reading; return the engine's work in the window, or since the first reading."""
        readings = self._readings
        if not readings or now.at_s - readings[-1].at_s >= self._apart_s:
            readings.append(now)
        while len(readings) > 1 and now.at_s - readings[1].at_s >= self._length_s:
            readings.popleft()
        return now.since(readings[0])
