"""Remembers a tier's latest evictions: they explain misses, and show the hits of a larger tier.

A tier of twice the size would still have the latest of these blocks, as many as this tier holds;
one of four times the size, three times as many. Every n-th evicted block is kept, in the order of
eviction, and counts as n hits if it returns while it is kept. With ``lru`` this is exact except for
the sampling. Other policies keep blocks that they expect to be read, so they would hit some more.

Rejected: positions by a count of evictions. It counts blocks that have returned as still gone, and
finds a tenth less.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final

from kvtier.engine.account.sampling import EveryNth

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtier.core.statistics import SourceCounts
    from kvtier.plugin_api.keys import Key

REMEMBERED_MIN: Final = 512
REMEMBERED_MAX: Final = 8192
BLOCKS_A_KEY: Final = 64
"""One key is remembered for this many blocks of the tier's capacity, within these limits;
``LARGEST`` times as many in all."""

LARGEST: Final = 3
"""The largest tier that is estimated exceeds the tier by this many times its size."""


class Evictions:
    """Tracks the evictions of one tier of ``capacity`` blocks."""

    def __init__(self, counts: SourceCounts, capacity: int) -> None:
        remembered = min(max(capacity // BLOCKS_A_KEY, REMEMBERED_MIN), REMEMBERED_MAX)
        self.capacity = capacity
        self._counts = counts
        self._sample = EveryNth(-(-capacity // remembered))
        self._size = capacity // self._sample.every
        self._gone: OrderedDict[Key, float] = OrderedDict()  # oldest first, with the time
        self._of_twice: OrderedDict[Key, None] = OrderedDict()  # the latest of these

    @property
    def weight(self) -> int:
        """How many blocks each remembered one stands for."""
        return self._sample.every

    def add(self, keys: Sequence[Key], now: float) -> None:
        """Note that the tier has evicted blocks."""
        gone, of_twice = self._gone, self._of_twice
        for key in self._sample.of(keys):
            gone[key], of_twice[key] = now, None
            gone.move_to_end(key)
            of_twice.move_to_end(key)
            if len(of_twice) > self._size:
                of_twice.popitem(last=False)
                if len(gone) > LARGEST * self._size:
                    gone.popitem(last=False)

    def since(self, key: Key) -> float | None:
        """Return when a block was evicted, if it is remembered."""
        return self._gone.get(key)

    def on_miss(self, keys: Sequence[Key]) -> None:
        """Note that requests wanted blocks that the tier did not have."""
        in_twice, in_four_times = self._pop(keys)
        if in_four_times:
            self._counts.hits_if_twice += self.weight * in_twice
            self._counts.hits_if_four_times += self.weight * in_four_times

    def forget(self, keys: Sequence[Key]) -> None:
        """Note that the tier has these blocks."""
        self._pop(keys)

    def clear(self) -> None:
        """Forget all."""
        self._gone.clear()
        self._of_twice.clear()

    def _pop(self, keys: Sequence[Key]) -> tuple[int, int]:
        """Forget the keys; return how many were among the latest, and how many were kept."""
        gone, of_twice = self._gone, self._of_twice
        if gone.keys().isdisjoint(keys):  # the usual case, in a third of the loop's time
            return 0, 0
        before = len(of_twice), len(gone)
        for key in keys:
            if gone.pop(key, None) is not None:
                of_twice.pop(key, None)
        return before[0] - len(of_twice), before[1] - len(gone)
