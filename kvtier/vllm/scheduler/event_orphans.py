"""Tracks blocks that a router drops because it lacks their parents, to announce them again later.

A block is an orphan if it was announced while its parent was announced nowhere, or was an orphan
itself. llm-d keeps a parent for as long as any medium has it; it does not restore a dropped block
when the parent arrives. A head leaves before its tail if a tier stores the tail late, or if
another KV-cache group needed the room.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence


class Orphans:
    """The orphans among described blocks. ``is_announced``: whether a block is anywhere."""

    def __init__(self, is_announced: Callable[[bytes], bool]) -> None:
        self._is_announced = is_announced
        self._parent_of: dict[bytes, bytes] = {}  # of described blocks, except first ones
        self._children: dict[bytes, dict[bytes, None]] = {}  # by parent: its orphans, in order
        self._orphans: set[bytes] = set()
        self._adopted: deque[bytes] = deque()  # their parent has arrived

    def meet(self, key: bytes, parent: bytes | None) -> None:
        """Record the parent of a block. None: it has none, or it is unknown."""
        if parent is not None:
            self._parent_of[key] = parent

    def announced(self, keys: Sequence[bytes]) -> None:
        """Note the blocks announced now, in this order, and the orphans that they adopt."""
        to_come = set(keys)
        for key in keys:
            to_come.discard(key)
            parent = self._parent_of.get(key)
            if parent is None or self._is_known(parent, to_come):
                if self._children or self._orphans:
                    self._root(key, parent)
            else:
                self._orphans.add(key)
                self._children.setdefault(parent, {})[key] = None

    def pop_adopted(self) -> bytes | None:
        """Return a block to announce again; None if there is none."""
        while self._adopted:
            key = self._adopted.popleft()
            if key in self._orphans and self._is_announced(key):
                return key
        return None

    def forget(self, key: bytes) -> None:
        """Forget a block that is no longer described."""
        self._leave(key, self._parent_of.pop(key, None))

    def clear(self) -> None:
        """Forget all blocks."""
        self._parent_of.clear()
        self._children.clear()
        self._orphans.clear()
        self._adopted.clear()

    def _is_known(self, parent: bytes, to_come: Collection[bytes]) -> bool:
        is_there = parent not in to_come and self._is_announced(parent)
        return is_there and parent not in self._orphans

    def _root(self, key: bytes, parent: bytes | None) -> None:
        self._leave(key, parent)
        self._adopted.extend(self._children.get(key, ()))

    def _leave(self, key: bytes, parent: bytes | None) -> None:
        """Remove it from the orphans."""
        if key not in self._orphans:
            return
        self._orphans.discard(key)
        siblings = self._children.get(parent, {}) if parent is not None else {}
        siblings.pop(key, None)
        if not siblings and parent is not None:
            self._children.pop(parent, None)
