"""Mistakes that one could make in the real code; most are one function in another's place.

A model checker that never fails proves nothing. Each of these must be caught.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from msgspec import structs
from mutating import Mutations

from kvtier.core import messages as m
from kvtier.core import wire
from kvtier.core.events import EventKind, EventLog
from kvtier.engine.link.circuit_breaker import Breaker
from kvtier.engine.link.flights import LinkTime, Numbers, _Watch
from kvtier.engine.link.jobs import Job, WaitingJobs
from kvtier.engine.link.tier_link import TierLink
from kvtier.engine.link.write_backlog import WriteBacklog
from kvtier.engine.primary import prefix_reservations, tier_directory
from kvtier.engine.primary.cascades import Cascades, MissingPrefixes
from kvtier.engine.primary.load_completions import LoadCompletions
from kvtier.engine.primary.primary_tier import PrimaryTier
from kvtier.engine.primary.requests import Request
from kvtier.engine.primary.slot_table import SlotTable
from kvtier.engine.primary.tier_directory import Search, TierDirectory
from kvtier.plugin_api.backend import Outcome
from kvtier.tier import batching, bounded_tier, unbounded_tier
from kvtier.tier.batching import BlockBatch
from kvtier.tier.bounded_tier import BoundedTier
from kvtier.tier.leftovers import Leftovers, Unannounced
from kvtier.tier.unbounded_tier import UnboundedTier

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvtier.core.statistics import PrimaryCounts

MUTATIONS = Mutations()
mutation, in_place_of = MUTATIONS.add, MUTATIONS.in_place_of


@in_place_of(PrimaryTier, "_cascade_ended")
def drop_an_unpin(self: PrimaryTier, message: m.CascadeEnded) -> None:
    """The end of a cascade leaves its pin."""
    if message.epoch != self.epoch:
        self._load_completions.release(message.slots)
    else:
        self._unhold(message.keys, message.slots)


@mutation
def take_a_counted_hit_back() -> Iterator[None]:
    """A hit becomes a miss once a later lookup of the same request misses."""
    begin = Request.__init__

    def init(self: Request, search: Search) -> None:
        begin(self, search)
        self.hits, self.misses = _NeverSeen(), _NeverSeen()

    def count(self: Request, counts: PrimaryCounts) -> None:
        hits = len(self.hits - self.misses)
        counts.hits += hits - self._hits_counted
        self._hits_counted = hits

    with patch.object(Request, "__init__", init), patch.object(Request, "count", count):
        yield


@mutation
def count_a_miss_again_as_a_hit() -> Iterator[None]:
    """A key that was no hit at its first lookup is one later, of the same request."""
    begin = Request.__init__

    def init(self: Request, search: Search) -> None:
        begin(self, search)
        self.misses = _NeverSeen()

    with patch.object(Request, "__init__", init):
        yield


class _NeverSeen(set[bytes]):
    """Keys of which nobody finds out that they are here."""

    def __contains__(self, key: object) -> bool:
        return False

    def isdisjoint(self, other: object) -> bool:
        return True


@in_place_of(SlotTable, "quarantine")
def reuse_a_quarantined_slot_at_once(real: Any, self: SlotTable, slot: int, users: int) -> None:
    """An abandoned slot goes straight back to the free ones."""
    real(self, slot, users)
    while self.release(slot):
        pass


@in_place_of(LoadCompletions, "_abandoned")
def free_a_slot_whose_fill_is_abandoned(
    self: LoadCompletions, message: m.PromotionAbandoned
) -> None:
    """At a promotion's deadline its slot counts as release."""
    if message.epoch == self._epoch:
        for key, slot in zip(message.keys, message.slots, strict=True):
            request = self._promotions.on_lost(key, slot)
            self._directory.failed(key, request, message.tier)
            self._slots.fail_fill(slot)
        self._not_filled(message.keys)


@in_place_of(Job, "has_lost_patience")
def wait_for_a_load_for_ever(_self: Job, _now: float) -> bool:
    """As long as the tier does anything else."""
    return False


@in_place_of(WaitingJobs, "pop_due")
def wait_in_a_queue_for_ever(_self: WaitingJobs, _now: float) -> list[Job]:
    """A load that is not sent yet has no end of patience."""
    return []


@in_place_of(_Watch, "is_stalled")
def never_notice_that_a_tier_hangs(_self: _Watch[Any], _now: float, _limit_s: float) -> bool:
    """What it has begun is given up only if it does others meanwhile."""
    return False


@in_place_of(_Watch, "on_end")
def take_a_queue_for_a_failure(real: Any, self: _Watch[Job], flight: Job, now: float) -> None:
    """A tier is late with all that it has since it had nothing to do."""
    moved_at = self.moved_at
    real(self, flight, now)
    self.moved_at = moved_at


@in_place_of(LinkTime, "leave_out")
def take_a_busy_machine_for_a_hung_tier(_self: LinkTime, _seconds: float) -> None:
    """A tier that nobody runs is late with what it has."""


@in_place_of(_Watch, "pop_late")
def never_give_up_what_hangs(_self: _Watch[Any], _now: float, _limit_s: float) -> list[Job]:
    """A tier that does nothing any more is bypassed, and what it has is waited for."""
    return []


@in_place_of(TierLink, "_withdraw")
def send_what_nobody_waits_for(*_: object) -> None:
    """A client that hung up costs all that it had asked for."""


@in_place_of(LoadCompletions, "_late")
def throw_away_what_arrives_late(self: LoadCompletions, message: m.PromotionLate) -> None:
    """Bytes that were paid for serve nobody."""
    self.release(message.slots)


@in_place_of(LoadCompletions, "_late")
def take_a_late_block_for_another_epochs(
    real: Any, self: LoadCompletions, message: m.PromotionLate
) -> None:
    """What was asked for before a reset is kept after it."""
    real(self, structs.replace(message, epoch=self._epoch))


@in_place_of(WaitingJobs, "add")
def put_tails_before_heads(
    real: Any, self: WaitingJobs, message: m.Promote | m.Cascade, now: float
) -> None:
    """What comes last is sent first."""
    real(self, message, now)
    self._parts[message.request].rotate(1)


@in_place_of(TierLink, "_job_ended")
def accept_a_late_completion(real: Any, self: TierLink, message: wire.JobEnded) -> None:
    """A load that ends after its deadline is reported as if in time."""
    loads, job = self._loads, self._loads.get(message.job)
    if job is not None and not job.is_awaited:
        job.is_awaited = True
        loads.left, loads.left_blocks = loads.left - 1, loads.left_blocks - job.size
    real(self, message)


@in_place_of(PrimaryTier, "_cascade_ended")
def ignore_the_epoch_of_a_cascade(self: PrimaryTier, message: m.CascadeEnded) -> None:
    """The end of a cascade from before a reset takes a pin of after it."""
    self.slots.unpin(message.slots)
    self._unhold(message.keys, message.slots)


@in_place_of(LoadCompletions, "_ended")
def ignore_the_epoch_of_a_promotion(
    real: Any, self: LoadCompletions, message: m.PromotionEnded
) -> None:
    """A load from before a reset is taken for one of after it."""
    real(self, structs.replace(message, epoch=self._epoch))


@in_place_of(PrimaryTier, "_complete_store")
def ignore_the_epoch_of_a_gpu_store(real: Any, self: PrimaryTier, message: m.CompleteStore) -> None:
    """The end of a store from before a reset is taken for that of one after it."""
    real(self, structs.replace(message, epoch=self.epoch))


@in_place_of(PrimaryTier, "_complete_load")
def ignore_the_epoch_of_a_gpu_load(real: Any, self: PrimaryTier, message: m.CompleteLoad) -> None:
    """The end of a load from before a reset takes the pin of one after it."""
    real(self, structs.replace(message, epoch=self.epoch))


@in_place_of(TierLink, "_job_ended")
def take_a_doubled_completion_for_another(
    real: Any, self: TierLink, message: wire.JobEnded
) -> None:
    """A job that ended is still waited for, so that its second end counts too."""
    transfers = self._stores if self._loads.get(message.job) is None else self._loads
    job = transfers.get(message.job)
    real(self, message)
    if job is not None:
        transfers._flights[message.job] = job


@in_place_of(PrimaryTier, "_requests_scheduled")
def keep_the_leases_of_a_scheduled_request(
    self: PrimaryTier, _message: m.RequestsScheduled
) -> None:
    """What was promoted for a request is kept until it ends, though it runs without it."""
    self.reply(None)


@in_place_of(tier_directory._Probes, "_is_wanted")
def ask_for_what_nobody_waits_for(*_: object) -> bool:
    """Probes are sent for requests that have been scheduled, or are over."""
    return True


@in_place_of(prefix_reservations, "longest_prefix")
def judge_one_group_at_a_time(real: Any, groups: Any, cost: Any, room: int) -> Any:
    """A prefix is reserved as far as the first group's blocks have room."""
    return real(groups[:1], cost, room)


@in_place_of(WriteBacklog, "refused")
def lose_what_an_admission_policy_refuses(_self: WriteBacklog, _message: m.CascadeRefused) -> None:
    """Nobody is told that a refused block is not going to be read."""


@in_place_of(TierDirectory, "find")
def promote_behind_a_gap(real: Any, self: TierDirectory, key: bytes, search: Search) -> int:
    """A block is promoted though the one before it may be nowhere."""
    search.gaps.clear()
    return real(self, key, search)


@in_place_of(EventLog, "add")
def drop_a_removed_event(real: Any, self: EventLog, kind: EventKind, keys: Any = ()) -> None:
    """Nobody is told of evictions."""
    if kind is not EventKind.REMOVED:
        real(self, kind, keys)


@in_place_of(LoadCompletions, "_ended")
def admit_a_failed_block(real: Any, self: LoadCompletions, message: m.PromotionEnded) -> None:
    """A block that failed, or fails its check, is served."""
    real(self, structs.replace(message, outcomes=(Outcome.DONE,) * len(message.keys)))


@in_place_of(PrimaryTier, "_cascade_ended")
def forget_a_hold_after_a_cascade(self: PrimaryTier, message: m.CascadeEnded) -> None:
    """A block stays unevictable for ever once a tier has stored it."""
    if message.epoch != self.epoch:
        self._load_completions.release(message.slots)
    else:
        self.slots.unpin(message.slots)


@in_place_of(SlotTable, "gpu_flushed")
def leave_a_flushed_slot_in_quarantine(*_: object, **__: object) -> None:
    """What the GPU has released is not taken back."""


@in_place_of(SlotTable, "reset")
def take_back_the_gpu_slots_at_a_reset(real: Any, self: SlotTable, unsent: Any) -> None:
    """A reset does not wait for the GPU's late writes."""
    real(self, unsent)
    self.gpu_flushed()


@in_place_of(BoundedTier, "_victims")
def let_a_tier_overflow(real: Any, self: BoundedTier, _message: m.Victims) -> None:
    """A tier with a capacity forgets to make room, and thinks it did."""
    real(self, m.Victims(keys=()))


@in_place_of(BoundedTier, "_forget")
def count_on_no_room_for_a_lost_block_that_is_stored_anew(
    real: Any, self: BoundedTier, keys: Any
) -> None:
    """A block is lost while it is being stored, and the tier no longer counts on its return."""
    with patch.object(self, "_storing", Counter()):
        real(self, keys)


@in_place_of(Leftovers, "add")
def cut_off_what_no_longer_fits(*_: object, **__: object) -> None:
    """Blocks from before for which there is no room any more stay in the backend, uncounted."""


@in_place_of(Leftovers, "defer")
def leave_what_a_failed_call_left(*_: object, **__: object) -> None:
    """A store that failed is taken to have kept nothing, a removal to have removed all."""


@in_place_of(BoundedTier, "_note_loaded")
def take_damaged_blocks_for_removed(real: Any, self: BoundedTier, *ended: Any) -> None:
    """That the driver removes them may fail: a copy takes room that nobody frees."""
    with patch.object(self, "_leave", lambda _: None):
        real(self, *ended)


@in_place_of(Unannounced, "removed")
def count_what_was_removed_before_it_was_told(*_: object, **__: object) -> None:
    """A backend's list of what it had from before is told as it was taken down."""


@mutation
def find_what_older_weights_computed() -> Iterator[None]:
    """A generation leaves no mark: what was stored before a reset is found after it."""

    def unchanged(keys: tuple[bytes, ...], _mark: bytes) -> tuple[bytes, ...]:
        return keys

    with (
        patch.object(bounded_tier, "marked", unchanged),
        patch.object(unbounded_tier, "marked", unchanged),
        patch.object(batching, "marked", unchanged),
    ):
        yield


@in_place_of(BoundedTier, "_found")
def serve_what_a_tier_has_of_another_generation(
    real: Any, self: BoundedTier, keys: Any
) -> list[bytes]:
    """A tier that is restarted takes all that it finds for the engine's own."""
    with patch.object(bounded_tier, "mark_of", lambda _key: self._mark):
        return real(self, keys)


@in_place_of(UnboundedTier, "_tell_gone")
def tell_nobody_what_a_shared_tier_has_not(*_: object, **__: object) -> None:
    """A router is told of a block that a load found damaged, and that was removed."""


@in_place_of(Numbers, "count_stray")
def let_a_stray_answer_pass_uncounted(*_: object, **__: object) -> None:
    """Answers that nobody waits for leave no trace."""


@in_place_of(TierLink, "_tier_fenced")
def let_a_cut_off_tier_keep_its_slots(real: Any, self: TierLink, message: wire.TierFenced) -> None:
    """A fenced tier's cascades are forgotten with their pins."""
    self._stores.pop_all()
    real(self, message)


@in_place_of(Cascades, "_in_front_of_holes")
def write_behind_a_hole(_self: Cascades, _tier: int, batch: Any, _request: str) -> Any:
    """A block goes to a tier that has not got the one before it, nor will soon."""
    return batch


@in_place_of(WriteBacklog, "ask_again")
def forget_to_ask_for_what_was_deferred(*_: object) -> None:
    """A tier that has room again is not given what it could not take."""


@in_place_of(PrimaryTier, "_cascade_deferred")
def keep_the_slots_of_what_is_deferred(self: PrimaryTier, message: m.CascadeDeferred) -> None:
    """What a tier could not take stays pinned for it."""
    self._cascades.defer(message)


@in_place_of(Cascades, "defer")
def forget_what_a_tier_could_not_take(*_: object) -> None:
    """It is released, and its tail goes to the tier."""


@in_place_of(Cascades, "leave")
def offer_what_has_left_host_memory(*_: object) -> None:
    """What was deferred, and is evicted, still waits for its tier."""


@in_place_of(PrimaryTier, "_would_cost_deferred")
def refuse_stores_that_evict(*_: object) -> bool:
    """A store gets free slots, and no others."""
    return True


@in_place_of(MissingPrefixes, "_is_lost")
def offer_the_tail_of_what_is_gone(*_: object) -> bool:
    """A block that was deferred goes to its tier though the one before it never will."""
    return False


@in_place_of(Breaker, "on_restart")
def never_try_a_tier_again(self: Breaker) -> None:
    """A trial that succeeded leaves the breaker where it is, in a state no row leads from."""
    self._failures = 0


@mutation
def mix_up_jobs_that_go_together() -> Iterator[None]:
    """Where a batch has blocks of two jobs, each block has another one's slot."""

    def slots(self: BlockBatch) -> tuple[int, ...]:
        return sum([job_slice.slots for job_slice in reversed(self.slices)], ())

    with patch.object(BlockBatch, "slots", property(slots)):
        yield
