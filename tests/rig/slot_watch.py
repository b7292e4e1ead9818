"""Whose slots are read and written: promises 2 and 3, at the moment at which bytes move.

A slot that was given away too early shows as wrong KV only if somebody else fills it
before the copy. Here it shows at once: what the GPU or a tier reads is pinned or in
quarantine, what they write is being filled by them or in quarantine.

And what of a slot a tier gets to see: no more words than its block has.
"""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from kvtier.engine.primary.slot_table import SlotState
from kvtier.plugin_api.keys import GROUP_BYTES
from kvtier.tier.backend_driver import BackendDriver

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from kvtier.engine.primary.slot_table import SlotTable
    from kvtier.tier import driver_messages as d


class SlotMisused(AssertionError):
    """Raised when a slot is read that nobody pins, or written that is not being filled."""


class LeftBehind(AssertionError):
    """Raised when a tier is handed what an earlier block left in a slot, of another request."""


class SlotWatch:
    """Looks at the slots of one engine."""

    def __init__(self) -> None:
        self.words_of: Counter[int] = Counter()
        """So many has a block of each KV-cache group, of all ranks. Empty: they are not counted."""
        self._left_behind: LeftBehind | None = None  # a tier's driver takes it for a fault
        self.slots: SlotTable | None = None  #: None: no scheduler runs yet
        self._by_tiers: list[tuple[str, tuple[int, ...]]] = []

    def gpu_copies(self, kind: str, slots: Iterable[int]) -> None:
        """Check a copy that is made now. ``kind``: store or load."""
        if self.slots is not None:
            self._check(f"the GPU's {kind}", slots, writes=kind == "store", of_gpu=True)

    def tiers_work(self) -> None:
        """Check what tiers are at, and were handed."""
        if self._left_behind is not None:
            raise self._left_behind
        for what, slots in self._by_tiers:
            self._check(what, slots, writes="load" in what, of_gpu=False)

    def tier_has(self, tier: str, key: bytes, view: memoryview) -> None:
        """Check what a tier was handed. The model writes no words that are zero."""
        group = int.from_bytes(key[-GROUP_BYTES:], "big")
        words = np.count_nonzero(np.frombuffer(view, dtype=np.uint64))
        if self.words_of and words > self.words_of[group]:
            self._left_behind = LeftBehind(
                f"{tier} is handed {words} words for a block of group {group}, which has "
                f"{self.words_of[group]}"
            )

    def _check(self, what: str, slots: Iterable[int], *, writes: bool, of_gpu: bool) -> None:
        table = self.slots
        assert table is not None
        fills = table.gpu_fills if of_gpu else table.tier_fills
        for slot in slots:
            may = slot in fills if writes else slot in table.pins
            if not (may or slot in table.quarantined):
                state = SlotState(table.state[slot]).name
                verb = "writes" if writes else "reads"
                raise SlotMisused(f"{what} {verb} slot {slot}, which is {state} and not its own")

    @contextmanager
    def tier_works(self, what: str, slots: tuple[int, ...]) -> Iterator[None]:
        """Note what a tier is at."""
        work = (what, slots)
        self._by_tiers.append(work)
        try:
            yield
        finally:
            self._by_tiers.remove(work)


def watched_driver(watch: SlotWatch) -> type[BackendDriver]:
    """Return a tier's driver that tells the watch what its backend is at."""

    class Driver(BackendDriver):
        async def _load(self, message: d.LoadBatch) -> Any:
            with watch.tier_works(f"a load of {self._name}", message.slots):
                return await super()._load(message)

        async def _store(self, message: d.StoreBatch) -> Any:
            with watch.tier_works(f"a store of {self._name}", message.slots):
                stored = await super()._store(message)
                for key, slot in zip(message.keys, message.slots, strict=True):
                    watch.tier_has(self._name, key, self._memory.view(slot))
                return stored

    return Driver
