"""Collects the blocks used since the last report. Coarse: no order, and a limited number."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

import numpy as np

from kvtier_backends.fs.bound.records import BLOCKS, Array

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvtier_backends.fs.bound.names import Location

USES_MAX: Final = 1 << 16


class Uses:
    """Blocks that this engine has loaded, or found to be stored. Any thread may call any method."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._used: dict[int, int] = {}

    def note(self, location: Location) -> None:
        """Note that a block was used. With too many, the oldest are forgotten."""
        with self._lock:
            self._used[location.block] = location.leaf
            if len(self._used) > USES_MAX:
                del self._used[next(iter(self._used))]

    def drain(self) -> Array:
        """Return them, and start again."""
        with self._lock:
            used, self._used = self._used, {}
        return as_array((block, leaf, 0) for block, leaf in used.items())


def as_array(blocks: Iterable[tuple[int, int, int]]) -> Array:
    """Return blocks as in the small files: number, leaf and size of each."""
    return np.array(list(blocks), BLOCKS)
