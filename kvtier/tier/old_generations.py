"""Tracks the blocks that a tier with a capacity has of generations its engine is not in.

They are not served. They take room until something is stored in their place:
they go before any block that the eviction policy would choose, and blocks that no
engine can find again go first of all.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

from kvtier.core.generations import is_found_again, mark_of

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator

    from kvtier.plugin_api.keys import Key


class OldGenerations:
    """Blocks by generation. Keys are the backend's."""

    def __init__(self) -> None:
        self._keys_of: dict[bytes, set[Key]] = {}  # by mark; the one left longest ago first
        self._count = 0

    def __len__(self) -> int:
        """Return the number of blocks."""
        return self._count

    def __contains__(self, key: Key) -> bool:
        """Return whether the block is one of them."""
        return self._count > 0 and key in self._keys_of.get(mark_of(key), ())

    def __iter__(self) -> Iterator[Key]:
        """Return all blocks."""
        return chain.from_iterable(self._keys_of.values())

    def leave(self, mark: bytes, keys: set[Key]) -> None:
        """Take over all blocks of a generation that ends. The caller must not use the set again."""
        held = self._keys_of.pop(mark, None)
        if held:
            self._count -= len(held)
            keys |= held
        if keys:
            self._keys_of[mark] = keys
            self._count += len(keys)

    def add(self, keys: Iterable[Key]) -> None:
        """Take over single blocks."""
        for key in keys:
            held = self._keys_of.setdefault(mark_of(key), set())
            if key not in held:
                held.add(key)
                self._count += 1

    def discard(self, keys: Iterable[Key]) -> None:
        """Forget blocks, if they are here."""
        if not self._count:
            return
        for key in keys:
            mark = mark_of(key)
            held = self._keys_of.get(mark)
            if held is not None and key in held:
                held.remove(key)
                self._count -= 1
                if not held:
                    del self._keys_of[mark]

    def of(self, mark: bytes) -> tuple[Key, ...]:
        """Return the blocks of one generation."""
        return tuple(self._keys_of.get(mark, ()))

    def pop(self, count: int, excluded: Container[Key]) -> tuple[Key, ...]:
        """Choose and forget up to ``count`` blocks to remove, none of the ``excluded``."""
        if not (count > 0 and self._count):
            return ()
        chosen: list[Key] = []
        passed: list[Key] = []
        for mark in sorted(self._keys_of, key=is_found_again):
            held = self._keys_of[mark]
            while held and len(chosen) < count:
                key = held.pop()
                (passed if key in excluded else chosen).append(key)
            if not held:
                del self._keys_of[mark]
        self._count -= len(chosen) + len(passed)
        self.add(passed)
        return tuple(chosen)
