"""Counts what happens, and says each kind of trouble once an episode."""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Final

import structlog

if TYPE_CHECKING:
    from collections.abc import Mapping

EPISODE_S_MIN: Final = 60.0

logger = structlog.get_logger(__name__)


class Ledger:
    """Counters and log lines of one tier. Any thread may call anything.

    An episode of a kind of trouble begins with its log line and ends with a
    success that comes ``EPISODE_S_MIN`` later or more.
    """

    def __init__(self, tier_name: str, path: str) -> None:
        self._tier_name = tier_name
        self._path = path
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._said: dict[str, float] = {}

    def add(self, name: str, count: int = 1) -> None:
        """Count without a word."""
        with self._lock:
            self._counts[name] += count

    def trouble(self, name: str, reason: object, count: int = 1) -> None:
        """Count ``name``, and log it if this kind has not been said in this episode."""
        with self._lock:
            self._counts[name] += count
            kind = f"{name}: {type(reason).__name__} {getattr(reason, 'errno', None)}"
            if kind in self._said:
                return
            self._said[kind] = time.monotonic()
        logger.warning(
            "disk tier: trouble, said once until it is over",
            kind=name,
            tier=self._tier_name,
            path=self._path,
            reason=str(reason),
        )

    def success(self) -> None:
        """End the episodes that are old enough. Costs nothing while all is well."""
        if self._said:
            with self._lock:
                before = time.monotonic() - EPISODE_S_MIN
                self._said = {kind: said for kind, said in self._said.items() if said > before}

    def counts(self) -> Mapping[str, int]:
        """Return a snapshot of all counts that are not 0."""
        with self._lock:
            return dict(self._counts)
