"""What the model knows of a disk's copies: which were given to it, and which may not come back."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtier.plugin_api.backend import StoreBlock
    from kvtier.plugin_api.keys import Key


class Copies:
    """Which copies of each key the tier was given, as digests, and which must not come back."""

    def __init__(self) -> None:
        self.given: dict[Key, set[bytes]] = {}
        self.gone: dict[Key, set[bytes]] = {}  # in this life: removed, or told to be lost
        self.stored_at: dict[tuple[Key, bytes], float] = {}  # the last time
        self._ended: dict[Key, set[bytes]] = {}
        self._running: Counter[tuple[Key, bytes]] = Counter()

    def begin(self, blocks: Sequence[StoreBlock], now: float) -> None:
        """Note that these are being stored."""
        for key, _, digest in blocks:
            self.stored_at[key, digest] = now
            self._running[key, digest] += 1
            for among in (self.gone, self._ended):
                among.setdefault(key, set()).discard(digest)
            self.given.setdefault(key, set()).add(digest)

    def end(self, blocks: Sequence[StoreBlock]) -> None:
        """Note that they are stored, or were not."""
        for key, _, digest in blocks:
            self._running[key, digest] -= 1
            self._ended[key].add(digest)

    def forget(self, keys: Sequence[Key]) -> None:
        """Note that the keys are gone: no copy whose store has ended may come back."""
        for key in keys:
            ended = {each for each in self._ended.get(key, ()) if not self._running[key, each]}
            self.gone.setdefault(key, set()).update(ended)

    def restart(self, found: dict[Key, bytes]) -> None:
        """Begin another life with what was recovered. Any copy may have been."""
        self.gone.clear()
        self._running.clear()
        self._ended = {key: {digest} for key, digest in found.items()}
