"""Counts incidents with a tier's files, and logs each kind of incident once per episode."""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Final

import structlog  # noqa: F401 - with the first line there may be no descriptor left for it

from kvtier.plugin_api.log import log

if TYPE_CHECKING:
    from collections.abc import Mapping

EPISODE_S_MIN: Final = 60.0


class TierCounters:
    """The counters of one tier, by name. Any thread may call any method."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def add(self, name: str, count: int = 1) -> None:
        """Add to a counter."""
        with self._lock:
            self._counts[name] += count

    def counts(self) -> Mapping[str, int]:
        """Return a snapshot of all counters that are not 0."""
        with self._lock:
            return dict(self._counts)


class IncidentLog:
    """Logs and counts one tier's incidents. Any thread may call any method.

    ``folder`` is where the tier's files are. An episode of one kind of incident
    begins with its log line, and ends with a success on the same side (``"load"``
    or ``"store"``) that comes at least ``EPISODE_S_MIN`` later: a medium that
    works half of the time is also reported only once.
    """

    def __init__(
        self, backend_type: str, tier_name: str, folder: str, counters: TierCounters
    ) -> None:
        self._event = f"{backend_type} tier: fault, logged once until it is over"
        self._tier_name = tier_name
        self._folder = folder
        self._counters = counters
        self._lock = threading.Lock()
        # For each side: when each kind's episode began.
        self._episodes: dict[str, dict[str, float]] = {"load": {}, "store": {}}

    def report(
        self, side: str, name: str, reason: object, *, path: str = "", count: int = 1
    ) -> None:
        """Count ``name``, and log it if its kind has not been logged in this episode.

        ``path`` is the file concerned, if there is one.
        """
        self._counters.add(name, count)
        kind = f"{name}: {type(reason).__name__} {getattr(reason, 'errno', None)}"
        with self._lock:
            if kind in self._episodes[side]:
                return
            self._episodes[side][kind] = time.monotonic()
        log.warning(
            self._event,
            kind=name,
            tier=self._tier_name,
            path=path or self._folder,
            reason=str(reason),
        )

    def success(self, side: str) -> None:
        """End the episodes of ``side`` that are old enough. Takes no lock if there are none."""
        if self._episodes[side]:
            with self._lock:
                before = time.monotonic() - EPISODE_S_MIN
                begun = self._episodes[side].items()
                self._episodes[side] = {kind: at for kind, at in begun if at > before}
