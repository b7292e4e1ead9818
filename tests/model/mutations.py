"""Mistakes that one could make in the real code, each as a context manager that makes it.

A model checker that never fails proves nothing. Each of these must be caught.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from kvtier.core import messages as m
from kvtier.core.events import EventKind, EventLog
from kvtier.engine import prefix_reservations
from kvtier.engine.circuit_breaker import Breaker
from kvtier.engine.primary_tier import PrimaryTier
from kvtier.engine.requests import Request
from kvtier.engine.slot_table import SlotTable
from kvtier.engine.tier_directory import Search, TierDirectory
from kvtier.engine.tier_link import TierLink
from kvtier.plugin_api.backend import Outcome
from kvtier.tier import batching, bounded_tier, unbounded_tier
from kvtier.tier.batching import BlockBatch
from kvtier.tier.bounded_tier import BoundedTier
from kvtier.tier.leftovers import Leftovers, Unannounced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvtier.core.statistics import PrimaryCounts

MUTATIONS: dict[str, Any] = {}


def mutation(make: Callable[[], Iterator[None]]) -> Callable[[], Any]:
    """Register a mutation under its function's name."""
    made = contextmanager(make)
    MUTATIONS[make.__name__] = made
    return made


@mutation
def drop_an_unpin() -> Iterator[None]:
    """The end of a cascade leaves its pin."""

    def ended(self: PrimaryTier, message: m.CascadeEnded) -> None:
        if message.epoch != self.epoch:
            self._slots_released(m.SlotsReleased(slots=message.slots))
        else:
            self._unhold(message.keys, message.slots)

    with patch.object(PrimaryTier, "_cascade_ended", ended):
        yield


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


@mutation
def reuse_a_quarantined_slot_at_once() -> Iterator[None]:
    """An abandoned slot goes straight back to the free ones."""
    real = SlotTable.quarantine

    def quarantine(self: SlotTable, slot: int, users: int) -> None:
        real(self, slot, users)
        while self.let_go(slot):
            pass

    with patch.object(SlotTable, "quarantine", quarantine):
        yield


@mutation
def free_a_slot_whose_fill_is_abandoned() -> Iterator[None]:
    """At a promotion's deadline its slot counts as let go of."""

    def abandoned(self: PrimaryTier, message: m.PromotionAbandoned) -> None:
        if message.epoch == self.epoch:
            for key, slot in zip(message.keys, message.slots, strict=True):
                request = self._promotions.lost(key, slot)
                self._directory.failed(key, request, message.tier)
                self.slots.fail_fill(slot)
            self._not_filled(message.keys)

    with patch.object(PrimaryTier, "_promotion_abandoned", abandoned):
        yield


@mutation
def forget_the_deadline_of_promotions() -> Iterator[None]:
    """A load that hangs is waited for."""

    def due(self: TierLink, work: Any) -> bool:
        return not getattr(work, "is_load", False) and self._now >= work.deadline

    with patch.object(TierLink, "_due", due):
        yield


@mutation
def forget_the_deadline_of_probes() -> Iterator[None]:
    """A probe that hangs is waited for."""

    def due(self: TierLink, work: Any) -> bool:
        return hasattr(work, "is_load") and bool(self._now >= work.deadline)

    with patch.object(TierLink, "_due", due):
        yield


@mutation
def accept_a_late_completion() -> Iterator[None]:
    """A load that ends after its deadline is reported as if in time."""
    real = TierLink._job_ended

    def ended(self: TierLink, message: m.JobEnded) -> None:
        job = self._jobs.get(message.job)
        if job is not None and job.is_load and job.abandoned:
            job.abandoned = False
            self._abandoned_slots -= len(job.slots)
        real(self, message)

    with patch.object(TierLink, "_job_ended", ended):
        yield


@mutation
def ignore_the_epoch_of_a_cascade() -> Iterator[None]:
    """The end of a cascade from before a reset takes a pin of after it."""

    def ended(self: PrimaryTier, message: m.CascadeEnded) -> None:
        self.slots.unpin(message.slots)
        self._unhold(message.keys, message.slots)

    with patch.object(PrimaryTier, "_cascade_ended", ended):
        yield


@mutation
def ignore_the_epoch_of_a_promotion() -> Iterator[None]:
    """A load from before a reset is taken for one of after it."""
    real = PrimaryTier._promotion_ended

    def ended(self: PrimaryTier, message: m.PromotionEnded) -> None:
        real(
            self,
            m.PromotionEnded(
                tier=message.tier,
                keys=message.keys,
                slots=message.slots,
                outcomes=message.outcomes,
                epoch=self.epoch,
            ),
        )

    with patch.object(PrimaryTier, "_promotion_ended", ended):
        yield


@mutation
def ignore_the_epoch_of_a_gpu_store() -> Iterator[None]:
    """The end of a store from before a reset is taken for that of one after it."""
    real = PrimaryTier._complete_store

    def complete(self: PrimaryTier, message: m.CompleteStore) -> None:
        real(self, m.CompleteStore(message.keys, message.request, message.success, self.epoch))

    with patch.object(PrimaryTier, "_complete_store", complete):
        yield


@mutation
def ignore_the_epoch_of_a_gpu_load() -> Iterator[None]:
    """The end of a load from before a reset takes the pin of one after it."""
    real = PrimaryTier._complete_load

    def complete(self: PrimaryTier, message: m.CompleteLoad) -> None:
        real(self, m.CompleteLoad(message.keys, message.request, self.epoch))

    with patch.object(PrimaryTier, "_complete_load", complete):
        yield


@mutation
def take_a_doubled_completion_for_another() -> Iterator[None]:
    """A job that ended is still waited for, so that its second end counts too."""
    real = TierLink._job_ended

    def ended(self: TierLink, message: m.JobEnded) -> None:
        job = self._jobs.get(message.job)
        real(self, message)
        if job is not None:
            self._jobs[message.job] = job

    with patch.object(TierLink, "_job_ended", ended):
        yield


@mutation
def keep_the_leases_of_a_scheduled_request() -> Iterator[None]:
    """What was promoted for a request is kept until it ends, though it runs without it."""

    def scheduled(self: PrimaryTier, _message: m.RequestsScheduled) -> None:
        self.reply(None)

    with patch.object(PrimaryTier, "_requests_scheduled", scheduled):
        yield


@mutation
def ask_for_what_nobody_waits_for() -> Iterator[None]:
    """Probes are sent for requests that have been scheduled, or are over."""
    with patch.object(TierDirectory, "_is_wanted", lambda *_: True):
        yield


@mutation
def judge_one_group_at_a_time() -> Iterator[None]:
    """A prefix is reserved as far as the first group's blocks have room."""
    real = prefix_reservations.longest_prefix

    def longest(groups: Any, cost: Any, room: int) -> Any:
        return real(groups[:1], cost, room)

    with patch.object(prefix_reservations, "longest_prefix", longest):
        yield


@mutation
def lose_what_an_admission_policy_refuses() -> Iterator[None]:
    """Nobody is told that a refused block is not going to be read."""

    def refused(_self: TierLink, _message: m.CascadeRefused) -> None:
        return

    with patch.object(TierLink, "_cascade_refused", refused):
        yield


@mutation
def promote_behind_a_gap() -> Iterator[None]:
    """A block is promoted though the one before it may be nowhere."""
    real = TierDirectory.find

    def find(self: TierDirectory, key: bytes, search: Search) -> int:
        search.gaps.clear()
        return real(self, key, search)

    with patch.object(TierDirectory, "find", find):
        yield


@mutation
def drop_a_removed_event() -> Iterator[None]:
    """Nobody is told of evictions."""
    real = EventLog.add

    def add(self: EventLog, kind: EventKind, keys: Any = ()) -> None:
        if kind is not EventKind.REMOVED:
            real(self, kind, keys)

    with patch.object(EventLog, "add", add):
        yield


@mutation
def admit_a_failed_block() -> Iterator[None]:
    """A block that failed, or fails its check, is served."""
    real = PrimaryTier._promotion_ended

    def ended(self: PrimaryTier, message: m.PromotionEnded) -> None:
        outcomes = (Outcome.DONE,) * len(message.keys)
        real(
            self,
            m.PromotionEnded(
                tier=message.tier,
                keys=message.keys,
                slots=message.slots,
                outcomes=outcomes,
                epoch=message.epoch,
            ),
        )

    with patch.object(PrimaryTier, "_promotion_ended", ended):
        yield


@mutation
def forget_a_hold_after_a_cascade() -> Iterator[None]:
    """A block stays unevictable for ever once a tier has stored it."""

    def ended(self: PrimaryTier, message: m.CascadeEnded) -> None:
        if message.epoch != self.epoch:
            self._slots_released(m.SlotsReleased(slots=message.slots))
        else:
            self.slots.unpin(message.slots)

    with patch.object(PrimaryTier, "_cascade_ended", ended):
        yield


@mutation
def leave_a_flushed_slot_in_quarantine() -> Iterator[None]:
    """What the GPU has let go of is not taken back."""
    with patch.object(SlotTable, "gpu_flushed", _nothing):
        yield


@mutation
def take_back_the_gpu_slots_at_a_reset() -> Iterator[None]:
    """A reset does not wait for the GPU's late writes."""
    real = SlotTable.reset

    def reset(self: SlotTable, unsent: Any) -> None:
        real(self, unsent)
        self.gpu_flushed()

    with patch.object(SlotTable, "reset", reset):
        yield


@mutation
def let_a_tier_overflow() -> Iterator[None]:
    """A tier with a capacity forgets to make room, and thinks it did."""
    real = BoundedTier._victims

    def victims(self: BoundedTier, _message: m.Victims) -> None:
        real(self, m.Victims(keys=()))

    with patch.object(BoundedTier, "_victims", victims):
        yield


@mutation
def cut_off_what_no_longer_fits() -> Iterator[None]:
    """Blocks from before for which there is no room any more stay in the backend, uncounted."""
    with patch.object(Leftovers, "add", _nothing):
        yield


@mutation
def leave_what_a_failed_call_left() -> Iterator[None]:
    """A store that failed is taken to have kept nothing, a removal to have removed all."""
    with patch.object(Leftovers, "put_off", _nothing):
        yield


@mutation
def count_what_was_removed_before_it_was_told() -> Iterator[None]:
    """A backend's list of what it had from before is told as it was taken down."""
    with patch.object(Unannounced, "removed", _nothing):
        yield


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


@mutation
def serve_what_a_tier_has_of_another_generation() -> Iterator[None]:
    """A tier that is restarted takes all that it finds for the engine's own."""
    real = BoundedTier._found

    def found(self: BoundedTier, keys: Any) -> list[bytes]:
        with patch.object(bounded_tier, "mark_of", lambda _key: self._mark):
            return real(self, keys)

    with patch.object(BoundedTier, "_found", found):
        yield


@mutation
def let_a_stray_answer_pass_uncounted() -> Iterator[None]:
    """Answers that nobody waits for leave no trace."""
    with patch.object(TierLink, "_count_stray", _nothing):
        yield


@mutation
def let_a_cut_off_tier_keep_its_slots() -> Iterator[None]:
    """A fenced tier's cascades are forgotten with their pins."""
    real = TierLink._tier_fenced

    def fenced(self: TierLink, message: m.TierFenced) -> None:
        for job in [each for each, job in self._jobs.items() if not job.is_load]:
            self._cascade_slots -= len(self._jobs.pop(job).slots)
        real(self, message)

    with patch.object(TierLink, "_tier_fenced", fenced):
        yield


@mutation
def never_try_a_tier_again() -> Iterator[None]:
    """A trial that succeeded leaves the breaker where it is, in a state no row leads from."""

    def restarted(self: Breaker) -> None:
        self._failures = 0

    with patch.object(Breaker, "restarted", restarted):
        yield


def _nothing(*_: object, **__: object) -> None:
    return


@mutation
def mix_up_jobs_that_go_together() -> Iterator[None]:
    """Where a batch has blocks of two jobs, each block has another one's slot."""

    def slots(self: BlockBatch) -> tuple[int, ...]:
        return sum([job_slice.slots for job_slice in reversed(self.slices)], ())

    with patch.object(BlockBatch, "slots", property(slots)):
        yield
