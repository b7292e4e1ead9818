"""Mistakes that one could make in choosing what to evict, and in keeping what must stay.

As in ``mutations``: each of these must be caught.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from mutations import MUTATIONS as MUTATIONS
from mutations import in_place_of, mutation

from kvtier.core import messages as m
from kvtier.core import wire
from kvtier.engine.primary.eviction import Eviction, StoreAfterEviction
from kvtier.engine.primary.primary_tier import PrimaryTier
from kvtier.engine.primary.promotions import Promotions
from kvtier.engine.primary.running_prefixes import RunningPrefixes
from kvtier.engine.primary.slot_table import SlotState, SlotTable

if TYPE_CHECKING:
    from collections.abc import Iterator


@mutation
def evict_a_pinned_slot() -> Iterator[None]:
    """The policy is not told of GPU loads, and the primary tier does not look."""
    real = PrimaryTier._prepare_load

    def prepare_load(self: PrimaryTier, message: m.PrepareLoad) -> None:
        policy = self.policy
        self.policy = _WithoutHeld(policy)
        real(self, message)
        self.policy = policy

    def is_held(self: SlotTable, slot: int) -> bool:
        return self.state[slot] == SlotState.FILLING or slot in self.leased

    with (
        patch.object(PrimaryTier, "_prepare_load", prepare_load),
        patch.object(SlotTable, "is_held", is_held),
    ):
        yield


class _WithoutHeld:
    """A policy's mailbox that loses the word of what is held."""

    def __init__(self, policy: Any) -> None:
        self._policy = policy

    def post(self, message: wire.Message) -> bool:
        if isinstance(message, m.Touched):
            message = m.Touched(message.keys, message.request)
        return self._policy.post(message)


@in_place_of(PrimaryTier, "_store_after_eviction")
def handle_a_store_again_once_there_is_room(self: PrimaryTier, message: StoreAfterEviction) -> None:
    """What waited for victims is run from its start, and so notes all that it has noted twice."""
    self.receive(message.store)


@in_place_of(Promotions, "start")
def skip_the_lease(
    real: Any, self: Promotions, key: bytes, slot: int, request: str, *rest: Any
) -> None:
    """Promoted blocks may be evicted before they are read."""
    real(self, key, slot, request, *rest)
    self.end_leases(request)


@in_place_of(PrimaryTier, "_end_leases")
def keep_the_lease_of_what_is_read(
    real: Any, self: PrimaryTier, request: str, keys: Any = None
) -> None:
    """A request that has read its blocks keeps them until it ends."""
    if keys is None:
        real(self, request)


@in_place_of(Eviction, "make_room")
def evict_the_heads_of_what_is_stored(
    real: Any, self: Eviction, slots: int, then: Any, _excluded: Any = ()
) -> None:
    """A store evicts the heads that it was offered with."""
    real(self, slots, then)


@in_place_of(Promotions, "has_room")
def skip_the_reserve(_self: Promotions) -> bool:
    """Promotions take every slot there is."""
    return True


@in_place_of(Eviction, "evict")
def evict_what_was_called_a_hit(real: Any, self: Eviction, victims: Any) -> Any:
    """A lookup that says READY doesn't keep the block until the step ends."""
    slots = self._slots
    hits, slots.hits = slots.hits, set()
    call = real(self, victims)
    slots.hits = hits
    return call


@in_place_of(RunningPrefixes, "stand_in")
def take_the_policys_word_for_what_goes_first(
    _self: RunningPrefixes, victim: bytes, _can_go: Any
) -> bytes:
    """A running request's head goes, whatever stands behind it."""
    return victim


@in_place_of(RunningPrefixes, "end")
def forget_who_else_shares_a_prefix(real: Any, self: RunningPrefixes, request: str) -> None:
    """When one of several requests ends, none of their blocks is looked for any more."""
    real(self, request)
    self._keys.clear()


@in_place_of(Eviction, "_evict_tails_of")
def forget_to_tell_the_policy_what_went_instead(real: Any, self: Eviction, victims: Any) -> None:
    """The policy goes on counting the block that went in its victim's place."""
    policy = self.policy
    self.policy = _Deaf()
    real(self, victims)
    self.policy = policy


class _Deaf:
    """A mailbox of nobody."""

    def post(self, _message: wire.Message) -> bool:
        return True
