"""Remembers the blocks that a tier evicted last: why requests miss, and what a larger tier hits.

They are those that a larger tier would still have: so many as the tier holds, for one of twice its
size. They are kept in the order in which they went, each n-th of them, and a block that is there
anew while it is among them counts n times. With ``lru`` this is exact but for the sample. Other
policies keep what they expect to be read, so their larger caches would have some more.

Rejected: positions by a count of evictions. It takes blocks that have come back for some that
are still gone, and finds a tenth less.
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
"""Of the blocks that a tier holds, one is remembered for so many, within these limits; and as many
for each time that its size fits into a larger one."""

LARGEST: Final = 3
"""The largest tier looked at is larger by so many times the tier's size."""


class Evictions:
    """Follows what one tier of ``capacity`` blocks evicts."""

    def __init__(self, counts: SourceCounts, capacity: int) -> None:
        remembered = min(max(capacity // BLOCKS_A_KEY, REMEMBERED_MIN), REMEMBERED_MAX)
        self._counts = counts
        self._sample = EveryNth(-(-capacity // remembered))
        self._size = capacity // self._sample.every
        self._gone: OrderedDict[Key, float] = OrderedDict()  # the oldest first; when they went
        self._of_twice: OrderedDict[Key, None] = OrderedDict()  # of these, the latest

    @property
    def weight(self) -> int:
        """How many blocks each one stands for."""
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
        """Note that blocks were wanted, which the tier did not have."""
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
        """Forget the keys; return how many were among the latest, and how many at all."""
        gone, of_twice = self._gone, self._of_twice
        if gone.keys().isdisjoint(keys):  # mostly: this takes a third of the time of the loop
            return 0, 0
        before = len(of_twice), len(gone)
        for key in keys:
            if gone.pop(key, None) is not None:
                of_twice.pop(key, None)
        return before[0] - len(of_twice), before[1] - len(gone)
