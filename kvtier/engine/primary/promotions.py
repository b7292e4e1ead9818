"""Tracks the primary tier's promotions: unsent, in flight, and leased.

A promoted block is leased to the request it was promoted for, from the moment
it gets a slot until the request reads it, is scheduled without it, ends, or
lets the lease expire. No lease expires while more of the request's blocks are on their way.
Slots that promotions hold (being filled by a tier, or leased) are counted, so
that a reserve stays for stores.

# Invariant: a slot is in at most one promotion job of at most one link.
#            Checked: start, _ended, p3_a_slot_that_is_written_has_one_writer_and_no_reader.
# Invariant: a request that waits for room leases nothing, so no two wait for one another.
#            Checked: lets_wait, p11_who_waits_for_room_holds_none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from kvtier.engine.primary.requests import Request
    from kvtier.engine.primary.slot_table import SlotTable
    from kvtier.plugin_api.keys import Key, RequestId

Batch = tuple[list["Key"], list[int]]


class _Leases:
    """The leases of one request: key → slot."""

    __slots__ = ("coming", "slot_of", "until")

    def __init__(self) -> None:
        self.slot_of: dict[Key, int] = {}
        self.coming: dict[int, int] = {}  # slot → the tier that it is filled from
        self.until = 0.0

    def is_expired(self, now: float) -> bool:
        """Return whether the request's leases have expired."""
        return now >= self.until and not self.coming


@dataclass(frozen=True)
class PromotionAudit:
    """A snapshot of promotions and leases, by request."""

    now: float
    held_slots: int
    unsent: frozenset[tuple[int, int, RequestId]]  #: slot, tier, request
    filling_for: Mapping[int, RequestId]
    leases: Mapping[RequestId, frozenset[Key]]


class Promotions:
    """Keeps the accounts; the primary tier moves the slots."""

    def __init__(self, slots: SlotTable, slots_max: int, lease_timeout_s: float) -> None:
        self._slots = slots
        self._slots_max = slots_max
        self._lease_timeout_s = lease_timeout_s
        self._unsent: dict[tuple[int, RequestId], Batch] = {}
        self._filling_for: dict[int, RequestId] = {}  # slot → the request it is for
        self._leases: dict[RequestId, _Leases] = {}
        self.held_slots = 0  #: filling from a tier, or leased
        self.now = 0.0  #: seconds of the runtime's clock, at the last Tick or end of a step
        #: The same, or the time of the first lookup since: an idle engine ends no step, and a
        #: request that comes then has not waited meanwhile.
        self.waits_now = 0.0

    def pass_time(self, now: float) -> None:
        """Set the time, in seconds of the runtime's clock."""
        self.now = self.waits_now = now

    def begin_lookups(self, now: float) -> None:
        """Note the time of a step's first lookup."""
        self.waits_now = now

    def has_room(self) -> bool:
        """Return whether one more promotion leaves the reserve for stores untouched."""
        return self.held_slots < self._slots_max

    def lets_wait(self, request: Request) -> bool:
        """Return whether a request still waits for others to release the slots that it needs."""
        assert not self.leases_of(request.search.request), "it waits, and leases slots"
        if self.now >= request.room_until:
            request.stop_waiting()
        return self._available() < min(request.room_wanted, self._slots_max)

    def _available(self) -> int:
        """Return how many slots promotions might take, if this step's lookups hit none of them."""
        slots = self._slots
        leased = self.held_slots - len(slots.tier_fills)
        loose = slots.ready_count() - len(slots.pins) - leased
        return min(self.room(), slots.free_count() + max(0, loose))

    def room(self) -> int:
        """Return how many slots promotions may take besides those that they hold."""
        return self._slots_max - self.held_slots

    def lease(self, key: Key, slot: int, request: RequestId) -> None:
        """Lease a slot without a lease to a request."""
        leases = self._leases.get(request)
        if leases is None:
            leases = self._leases[request] = _Leases()
        leases.slot_of[key] = slot
        leases.until = self.now + self._lease_timeout_s
        self._slots.lease(slot)
        self.held_slots += 1

    def start(self, key: Key, slot: int, request: RequestId, tier: int) -> None:
        """Record a promotion, to be sent with the step's others."""
        assert slot not in self._filling_for, "two promotions fill one slot"
        self.lease(key, slot, request)
        self._filling_for[slot] = request
        self._leases[request].coming[slot] = tier
        keys, slots = self._unsent.setdefault((tier, request), ([], []))
        keys.append(key)
        slots.append(slot)

    def pop_unsent(self) -> dict[tuple[int, RequestId], Batch]:
        """Return the batches to send, by tier and request; they count as sent from now on."""
        unsent, self._unsent = self._unsent, {}
        return unsent

    @property
    def has_unsent(self) -> bool:
        """Whether any promotion is to be sent at the end of the step."""
        return bool(self._unsent)

    def unsent_counts(self) -> dict[int, int]:
        """Return how many blocks each tier will be asked to load at the end of the step."""
        counts: dict[int, int] = {}
        for (tier, _), (keys, _) in self._unsent.items():
            counts[tier] = counts.get(tier, 0) + len(keys)
        return counts

    def call_off(self, request: RequestId) -> Batch:
        """Cancel the unsent promotions for ``request``; their slots are no longer filled for it."""
        return self._call_off([each for each in self._unsent if each[1] == request])

    def call_off_tier(self, tier: int) -> Batch:
        """Cancel the unsent promotions from ``tier``."""
        return self._call_off([each for each in self._unsent if each[0] == tier])

    def _call_off(self, batches: list[tuple[int, RequestId]]) -> Batch:
        keys: list[Key] = []
        slots: list[int] = []
        for tier_request in batches:
            batch = self._unsent.pop(tier_request)
            keys += batch[0]
            slots += batch[1]
        for key, slot in zip(keys, slots, strict=True):
            self.on_lost(key, slot)
        return keys, slots

    def arrived(self, slot: int) -> RequestId:
        """Note that the slot is filled; return the request that it was filled for."""
        request = self._ended(slot)
        if slot not in self._slots.leased:
            self.held_slots -= 1
        return request

    def on_lost(self, key: Key, slot: int) -> RequestId:
        """Note that the slot will not be filled; its lease ends too."""
        request = self._ended(slot)
        self.held_slots -= 1
        if slot in self._slots.leased:
            self._slots.end_lease(slot)
            leases = self._leases[request]
            del leases.slot_of[key]
            if not leases.slot_of:
                del self._leases[request]
        return request

    def _ended(self, slot: int) -> RequestId:
        request = self._filling_for.pop(slot, None)
        assert request is not None, "a promotion ended twice, or was never begun"
        leases = self._leases.get(request)
        if leases is not None:
            leases.coming.pop(slot, None)
            leases.until = self.now + self._lease_timeout_s
        return request

    def end_leases(self, request: RequestId, keys: Iterable[Key] | None = None) -> Batch:
        """End the request's leases on ``keys``, or all; return the ended ones."""
        ended: Batch = ([], [])
        leases = self._leases.get(request)
        if leases is None:
            return ended
        for key in list(leases.slot_of) if keys is None else keys:
            slot = leases.slot_of.pop(key, None)
            if slot is None:
                continue
            self._slots.end_lease(slot)
            if slot not in self._filling_for:
                self.held_slots -= 1
            ended[0].append(key)
            ended[1].append(slot)
        if not leases.slot_of:
            del self._leases[request]
        return ended

    def expired(self) -> list[RequestId]:
        """Return the requests whose leases have expired."""
        if not self._leases:
            return []
        return [name for name, leases in self._leases.items() if leases.is_expired(self.now)]

    def leases_of(self, request: RequestId) -> int:
        """Return how many slots a request leases."""
        leases = self._leases.get(request)
        return 0 if leases is None else len(leases.slot_of)

    def tiers_asked_for(self, request: RequestId) -> set[int]:
        """Return the tiers that are still to deliver blocks of a request."""
        leases = self._leases.get(request)
        return set() if leases is None else set(leases.coming.values())

    def reset(self) -> list[int]:
        """Forget everything; return the slots of promotions that were never sent.

        The slots' own leases end with the reset of the slots.
        """
        unsent = [slot for _, slots in self._unsent.values() for slot in slots]
        self._unsent.clear()
        self._filling_for.clear()
        self._leases.clear()
        self.held_slots = 0
        return unsent

    def audit(self) -> PromotionAudit:
        """Return the whole state, frozen. For tests and diagnosis: it costs O(n)."""
        unsent = [
            (slot, tier, request)
            for (tier, request), (_, slots) in self._unsent.items()
            for slot in slots
        ]
        leases = {request: frozenset(each.slot_of) for request, each in self._leases.items()}
        return PromotionAudit(
            self.now, self.held_slots, frozenset(unsent), self._filling_for.copy(), leases
        )
