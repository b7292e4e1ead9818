"""Tracks the blocks that the tier still has: the index, less those that are too old.

Blocks that the log drops for its own reasons are counted and reported to the tier
above, here and nowhere else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvtier_backends.disk.log.context import LogContext


class LiveBlocks:
    """The blocks in the index that are not too old. Event loop only.

    ``on_lost`` is called with the keys of blocks that are lost. ``ttl_s`` 0 means
    that no block is ever too old.
    """

    def __init__(
        self, context: LogContext, *, ttl_s: int, on_lost: Callable[[Sequence[bytes]], None]
    ) -> None:
        self._index = context.index
        self._regions = context.regions
        self._counters = context.counters
        self._now_s = context.now_s
        self._ttl_s = ttl_s
        self._on_lost = on_lost
        self._is_abandoned = False

    def has(self, key: bytes) -> bool:
        """Return whether a load would find the key. No I/O."""
        location = self._index.get(key)
        return location is not None and not self._is_expired(location)

    def find(self, keys: Sequence[bytes]) -> list[int | None]:
        """Return the location of each key's block, None if it is missing or too old."""
        found = self._index.find(keys)
        if self._ttl_s:
            expired = [
                place
                for place, location in enumerate(found)
                if location is not None and self._is_expired(location)
            ]
            self.lose([keys[place] for place in expired], "blocks_expired")
            for place in expired:
                found[place] = None
        return found

    def lose(self, keys: Sequence[bytes], counter: str) -> None:
        """Forget keys for the log's own reasons: count them, and report them as lost."""
        gone = self._index.remove_all(keys)
        if gone:
            self._counters.add(counter, len(gone))
            if not self._is_abandoned:
                self._on_lost(gone)

    def lose_region(self, region: int) -> None:
        """Forget the blocks of a region that cannot be read any more."""
        self.lose(self._index.keys_of(region), "blocks_lost_with_a_region")

    def sweep(self, region: int) -> None:
        """Forget a region's blocks that are older than ``ttl_s``."""
        if self._ttl_s:
            before_s = self._now_s() - self._ttl_s
            self.lose(self._index.stored_before(region, before_s), "blocks_expired")

    def abandon(self) -> None:
        """Forget all blocks: their folder has vanished. Nothing is reported from then on."""
        for keys in list(self._index.keys(self._regions.oldest_first())):
            self.lose(keys, "blocks_lost_with_the_folder")
        self._is_abandoned = True

    def _is_expired(self, location: int) -> bool:
        if not self._ttl_s:
            return False
        return self._index.record(location).stored_s + self._ttl_s < self._now_s()
