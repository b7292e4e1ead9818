"""Samples every n-th key of successive batches, at no cost for the others."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtier.plugin_api.keys import Key


class EveryNth:
    """One sample. ``every``: how many keys each sampled key stands for."""

    def __init__(self, every: int) -> None:
        self.every = every
        self._skipped = 0  # keys before the next sampled one

    def of(self, keys: Sequence[Key]) -> Sequence[Key]:
        """Return those of the next keys that belong to the sample."""
        first = self._skipped
        self._skipped = (first - len(keys)) % self.every
        return keys[first :: self.every]
