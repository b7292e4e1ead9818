"""Estimates the share of the blocks written to a tier that is ever read, from every n-th block."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvtier.engine.account.sampling import EveryNth

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtier.core.statistics import TierCounts
    from kvtier.plugin_api.keys import Key

EVERY: Final = 16
SAMPLED_MAX: Final = 16_384
"""Limit on blocks tracked until they are read; beyond it, the oldest count as never read."""


class ReadShare:
    """Tracks a sample of one tier's blocks."""

    def __init__(self, counts: TierCounts) -> None:
        self._counts = counts
        self._sample = EveryNth(EVERY)
        self._unread: dict[Key, None] = {}

    def on_stored(self, keys: Sequence[Key]) -> None:
        """Note that the tier has stored blocks."""
        sampled = self._sample.of(keys)
        self._counts.sampled_stores += len(sampled)
        for key in sampled:
            self._unread[key] = None
        while len(self._unread) > SAMPLED_MAX:
            del self._unread[next(iter(self._unread))]

    def on_loaded(self, keys: Sequence[Key]) -> None:
        """Note that the tier has delivered blocks."""
        if self._unread and not self._unread.keys().isdisjoint(keys):
            for key in keys:
                if key in self._unread:
                    del self._unread[key]
                    self._counts.sampled_reads += 1
