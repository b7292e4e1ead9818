"""Which blocks of the primary tier go on to which tiers.

A block that the GPU stored is cascaded to every tier, unless the tier's
admission policy (``kvtier/admission/``) refuses it. A tier that wants whole
requests (vLLM's request-level policy) is also given what was here already;
what is still being filled is parked and follows once it is READY.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtier.core import messages as m

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from kvtier.core.actor import Mailbox
    from kvtier.engine.promotions import Batch
    from kvtier.engine.slot_table import SlotTable
    from kvtier.plugin_api.keys import Key, RequestId, TierSet
    from kvtier.settings.runtime_config import TierConfig


class Cascades:
    """Decides, pins the slots and sends them off; the primary tier hears of their end."""

    def __init__(
        self, slots: SlotTable, tiers: Sequence[TierConfig], gates: Sequence[Mailbox]
    ) -> None:
        """``gates``: of each tier its admission gate, else its link."""
        self.all_tiers: TierSet = (1 << len(tiers)) - 1
        self._whole_requests: TierSet = sum(
            1 << number for number, tier in enumerate(tiers) if tier.request_level
        )
        self._tier_count = len(tiers)
        self._slots = slots
        self.parked: dict[Key, TierSet] = {}  #: not READY yet; where to, once they are
        self._gates = gates

    def send(self, batches: Mapping[int, Batch], request: RequestId, epoch: int) -> None:
        """Pin each block once for each tier that is to store it, and send the blocks off."""
        for _, slots in batches.values():
            self._slots.pin(slots)
        for tier, (keys, slots) in batches.items():
            self._gates[tier].post(m.Cascade(request, tuple(keys), tuple(slots), epoch))

    def of_ready(self, keys: Sequence[Key], slots: Sequence[int], to: TierSet) -> dict[int, Batch]:
        """Return what to send to each tier of blocks just READY: to ``to``, and where parked."""
        if not self.parked:
            whole = (list(keys), list(slots))
            return {n: whole for n in range(self._tier_count) if to & self.all_tiers & 1 << n}
        batches: dict[int, Batch] = {}
        for key, slot in zip(keys, slots, strict=True):
            tiers = (self.parked.pop(key, 0) | to) & self.all_tiers
            for tier in range(self._tier_count):
                if tiers >> tier & 1:
                    batch = batches.setdefault(tier, ([], []))
                    batch[0].append(key)
                    batch[1].append(slot)
        return batches

    def of_offered(self, keys: Iterable[Key]) -> dict[int, Batch]:
        """Return what to send to tiers that want whole requests of what is here already."""
        if not self._whole_requests:
            return {}
        ready: Batch = ([], [])
        for key in keys:
            slot = self._slots.slot_of.get(key)
            if slot is None:
                continue
            if self._slots.is_ready(slot):
                ready[0].append(key)
                ready[1].append(slot)
            else:
                self.parked[key] = self._whole_requests
        if not ready[0]:
            return {}
        return {n: ready for n in range(self._tier_count) if self._whole_requests >> n & 1}

    def of_wanted(self, tier: int, keys: Iterable[Key]) -> dict[int, Batch]:
        """Return what to send to a tier that wants ``keys`` now: those that are READY."""
        ready: Batch = ([], [])
        for key in keys:
            slot = self._slots.slot_of.get(key)
            if slot is not None and self._slots.is_ready(slot):
                ready[0].append(key)
                ready[1].append(slot)
        return {tier: ready} if ready[0] and self.all_tiers >> tier & 1 else {}

    def forget(self, key: Key) -> None:
        """Note that the key's fill came to nothing."""
        self.parked.pop(key, None)

    def leave_to_requests(self, tier: int) -> None:
        """Offer the tier nothing of every request: it goes by request."""
        self._whole_requests &= ~(1 << tier)

    def cut_off(self, tier: int) -> None:
        """Send nothing to the tier any more."""
        self.all_tiers &= ~(1 << tier)
        self._whole_requests &= self.all_tiers

    def reset(self) -> None:
        """Forget what is parked."""
        self.parked.clear()
