"""Mistakes about what is loaded and what is computed. Each must be caught."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mutating import Mutations

from kvtier.engine.link.flights import Flights
from kvtier.engine.link.jobs import Job
from kvtier.engine.primary.promotions import Promotions
from kvtier.engine.primary.tier_directory import Search, TierDirectory

if TYPE_CHECKING:
    from kvtier.engine.primary.requests import Request

MUTATIONS = Mutations()
in_place_of = MUTATIONS.in_place_of


@in_place_of(Job, "has_lost_patience")
def wait_on_though_computing_would_be_done(_self: Job, _now: float) -> bool:
    """A request waits for a tier that stalls until the tier's deadline."""
    return False


@in_place_of(Flights, "end")
def count_what_has_ended_as_outstanding(
    real: Any, self: Flights[Job], flight: Job, **how: Any
) -> None:
    """A tier seems ever busier."""
    outstanding = self.outstanding
    real(self, flight, **how)
    self.outstanding = outstanding


@in_place_of(Job, "has_lost_patience")
def give_up_a_load_again_and_again(self: Job, now: float) -> bool:
    """At the end of its request's patience, and at each step after that."""
    return now >= self.patience_end


@in_place_of(TierDirectory, "find")
def promote_what_was_declined(real: Any, self: TierDirectory, key: bytes, search: Search) -> int:
    """What a request computes sooner is loaded all the same."""
    declining, search.failed = search.failed, search._failed
    try:
        return int(real(self, key, search))
    finally:
        search.failed = declining


@in_place_of(Promotions, "lets_wait")
def wait_for_room_for_ever(_self: Promotions, _request: Request) -> bool:
    """A request that waits for slots once goes on waiting, though there are some."""
    return True
