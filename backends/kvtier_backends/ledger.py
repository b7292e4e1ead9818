"""Counts what happens to the files, and says each kind of trouble once an episode."""

from __future__ import annotations

import threading
import time
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import structlog

if TYPE_CHECKING:
    from collections.abc import Mapping

EPISODE_S_MIN: Final = 60.0

# Imported above, not with the first line: by then there may be no descriptor left for it.
_logger = structlog.get_logger(__name__)


def warn(event: str, **fields: object) -> None:
    """Write a line to the log. One that can't be written is dropped: that must stop nobody."""
    with suppress(Exception):
        _logger.warning(event, **fields)


class Ledger:
    """Counters and log lines of one tier. Any thread may call anything.

    ``folder`` is where the tier's files are. An episode of a kind of trouble
    begins with its first log line and ends with a success on the same side
    (``"load"`` or ``"store"``) that comes ``EPISODE_S_MIN`` later or more: a
    medium that works half of the time is said once as well.
    """

    def __init__(self, backend_type: str, tier_name: str, folder: str) -> None:
        self._event = f"{backend_type} tier: trouble, said once until it is over"
        self._tier_name = tier_name
        self._folder = folder
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._open: dict[str, dict[str, float]] = {"load": {}, "store": {}}  # kind → when said

    def add(self, name: str, count: int = 1) -> None:
        """Count without a word."""
        with self._lock:
            self._counts[name] += count

    def trouble(
        self, side: str, name: str, reason: object, *, path: str = "", count: int = 1
    ) -> None:
        """Count ``name``, and log it if this kind has not been said in this episode.

        ``path`` is the file it is about, where it is about one.
        """
        with self._lock:
            self._counts[name] += count
            kind = f"{name}: {type(reason).__name__} {getattr(reason, 'errno', None)}"
            if kind in self._open[side]:
                return
            self._open[side][kind] = time.monotonic()
        warn(
            self._event,
            kind=name,
            tier=self._tier_name,
            path=path or self._folder,
            reason=str(reason),
        )

    def success(self, side: str) -> None:
        """End the episodes of ``side`` that are old enough. Costs nothing while all is well."""
        if self._open[side]:
            with self._lock:
                before = time.monotonic() - EPISODE_S_MIN
                still = {kind: said for kind, said in self._open[side].items() if said > before}
                self._open[side] = still

    def counts(self) -> Mapping[str, int]:
        """Return a snapshot of all counts that are not 0."""
        with self._lock:
            return dict(self._counts)
