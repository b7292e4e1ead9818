"""Handles the ends of promotions, as their links report them, and updates their slots.

Part of the primary tier's actor. Promotions from before a reset only release their slots.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvtier.core import messages as m
from kvtier.plugin_api.backend import Outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvtier.engine.primary.eviction import Eviction
    from kvtier.engine.primary.lookups import Lookups
    from kvtier.engine.primary.promotions import Batch, Promotions
    from kvtier.engine.primary.slot_table import SlotTable
    from kvtier.plugin_api.keys import Key, RequestId


class LoadCompletions:
    """Handles the links' reports on promotions."""

    def __init__(
        self,
        slots: SlotTable,
        promotions: Promotions,
        lookups: Lookups,
        eviction: Eviction,
        became_ready: Callable[[Sequence[Key], Sequence[int], RequestId, int], None],
        not_filled: Callable[[Sequence[Key]], None],
    ) -> None:
        """``became_ready``, ``not_filled``: the primary tier's handlers for such keys."""
        self._slots = slots
        self._promotions = promotions
        self._lookups = lookups
        self._eviction = eviction
        self._directory = lookups.directory
        self._account = lookups.account
        self._became_ready = became_ready
        self._not_filled = not_filled
        self._epoch = 0

    def handlers(self) -> dict[type[Any], Callable[[Any], None]]:
        """Return the handler of each message type that the primary tier delegates to this."""
        return {
            m.PromotionEnded: self._ended,
            m.PromotionAbandoned: self._abandoned,
            m.PromotionWithdrawn: self._withdrawn,
            m.PromotionLate: self._late,
            m.SlotsReleased: lambda x: self.release(x.slots),
        }

    def begin_epoch(self, epoch: int) -> None:
        """Note a reset: promotions of other epochs no longer fill keys."""
        self._epoch = epoch

    def release(self, slots: Sequence[int]) -> None:
        """Note that one user of each of these slots has released it, if it is quarantined."""
        for slot in slots:
            self._slots.release(slot)

    def _ended(self, message: m.PromotionEnded) -> None:
        if message.epoch != self._epoch:
            self.release(message.slots)
            return
        arrived: Batch = ([], [])
        missing: dict[Outcome, list[Key]] = {}
        request_id = ""
        for key, slot, outcome in zip(message.keys, message.slots, message.outcomes, strict=True):
            if outcome is Outcome.DONE:
                request_id = self._promotions.arrived(slot)  # the same for the whole job
                request = self._lookups.requests.get(request_id)
                if request is not None:
                    request.delivered(key, message.tier)
                arrived[0].append(key)
                arrived[1].append(slot)
            else:
                self._directory.failed(key, self._promotions.on_lost(key, slot), message.tier)
                self._slots.fail_fill(slot)
                missing.setdefault(outcome, []).append(key)
        self._account.on_arrived(arrived[0], message.tier)
        for outcome, keys in missing.items():
            self._account.on_not_loaded(keys, message.tier, outcome, self._promotions.now)
        if missing:
            self._not_filled([key for keys in missing.values() for key in keys])
        self._slots.fill(arrived[1], self._slots.tier_fills)
        self._became_ready(*arrived, request_id, 0)

    def _abandoned(self, message: m.PromotionAbandoned) -> None:
        if message.epoch != self._epoch:
            return
        for key, slot in zip(message.keys, message.slots, strict=True):
            self._directory.failed(key, self._promotions.on_lost(key, slot), message.tier)
            self._slots.quarantine(slot, 1)
        now = self._promotions.now
        self._account.on_gone(message.keys, message.tier, "load_failed", now)
        self._not_filled(message.keys)

    def _withdrawn(self, message: m.PromotionWithdrawn) -> None:
        """Free the slots; other requests that want the blocks look them up again."""
        if message.epoch != self._epoch:
            self.release(message.slots)
            return
        for key, slot in zip(message.keys, message.slots, strict=True):
            self._promotions.on_lost(key, slot)
            self._slots.fail_fill(slot)
        self._not_filled(message.keys)

    def _late(self, message: m.PromotionLate) -> None:
        """Keep blocks that have arrived late, unless they are here by now: the load is paid for.

        Not while victims are chosen: the slot that this frees may be for the same block.
        """
        kept: Batch = ([], [])
        may_keep = message.epoch == self._epoch and not self._eviction.is_under_way
        for key, slot, outcome in zip(message.keys, message.slots, message.outcomes, strict=True):
            is_of_use = outcome is Outcome.DONE and may_keep
            if is_of_use and key not in self._slots.slot_of:
                self._slots.restore(slot, key)
                kept[0].append(key)
                kept[1].append(slot)
            else:
                self._slots.release(slot)
        if kept[0]:
            self._lookups.counts.late_blocks_kept += len(kept[0])
            self._directory.stop_probing(kept[0])
            self._lookups.policy.post(m.Admitted(tuple(kept[0]), "", held=True))
            self._became_ready(*kept, "", 0)
