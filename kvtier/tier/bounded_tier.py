"""Runs a secondary tier with a capacity: it belongs to this engine alone, and evicts.

It runs in the tier cell, next to the driver of its backend
(``kvtier/tier/job_runner.py``). This actor tracks the stored blocks, answers probes
itself, and makes room by asking its eviction policy. Blocks of generations that
the engine is not in are not served, and make room first
(``kvtier/tier/old_generations.py``).

Keys carry the mark of their generation on this side of the link
(``kvtier/core/generations.py``), but not on the other.

# Invariant: a key that is resident has the mark of the engine's own generation. Checked: _add,
#            p14_a_tier_serves_its_engine_nothing_of_another_generation.
# Invariant: _coming is what is in _storing and not in _resident. Checked: _used,
#            a_tier_counts_on_room_for_what_it_stores_and_does_not_have.
# Invariant: every job that came in is answered once, whatever the backend does, unless the
#            backend never returns. Checked: end, ended,
#            p8_late_doubled_and_unknown_completions_are_counted_and_otherwise_ignored.
"""

from __future__ import annotations

from collections import Counter, deque
from itertools import compress
from operator import not_
from typing import TYPE_CHECKING, Final

from kvtier.core import messages as m
from kvtier.core import wire
from kvtier.core.actor import Actor, Mailbox
from kvtier.core.generations import ORIGINAL, mark_of, marked, unmarked
from kvtier.plugin_api.backend import Outcome
from kvtier.tier import driver_messages as d
from kvtier.tier.audit import TierAudit
from kvtier.tier.batching import TierJob
from kvtier.tier.job_runner import JobRunner, end_slices
from kvtier.tier.leftovers import Leftovers
from kvtier.tier.old_generations import OldGenerations
from kvtier.tier.probes import ProbeSlice, RunningProbe

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvtier.plugin_api.backend import BackendTraits
    from kvtier.plugin_api.keys import Key, RequestId
    from kvtier.tier.batching import BlockBatch

ENDED_REQUESTS_MAX: Final = 1024
"""Number of ended requests to remember, whose last blocks may be stored afterwards."""


class BoundedTier(Actor):
    """The tier-cell end of one tier whose backend has a capacity."""

    def __init__(
        self,
        name: str,
        traits: BackendTraits,
        *,
        link: Mailbox,
        driver: Mailbox,
        policy: Mailbox,
    ) -> None:
        super().__init__(
            f"tier:{name}",
            {
                wire.GenerationBegan: lambda x: self._enter(x.mark, x.epoch),
                wire.Probe: self._probe,
                wire.LoadJob: self._begin,
                wire.StoreJob: self._begin,
                wire.TouchKeys: self._touch_keys,
                wire.RequestEnded: self._request_ended,
                wire.Tick: self._tick,
                d.BatchEnded: self._batch_ended,
                m.Victims: self._victims,
                wire.PolicyBroke: self._new_policy,
                wire.PolicyReturned: self._new_policy,
                d.ContentsFound: self._contents_found,
                d.ContentsAnnounced: self._contents_announced,
                d.ContentsLost: self._contents_lost,
            },
        )
        self.link = link
        self.driver = driver
        self.policy = policy
        self._mark = ORIGINAL  # of the generation that the engine is in
        self._since = 0  # the epoch in which it began
        self._knows_generation = False  # whether the engine has announced its generation
        self._jobs = JobRunner(traits, driver)
        assert traits.capacity_blocks is not None
        self._capacity = traits.capacity_blocks
        self._resident: set[Key] = set()
        self._old = OldGenerations()
        self._storing: Counter[Key] = Counter()  # in batches that have not ended
        self._coming: set[Key] = set()
        self._removing: set[Key] = set()  # victims and leftovers that the backend may still have
        self._leftovers = Leftovers()
        self._in_use: Counter[Key] = Counter()  # held at the policy: being loaded, or just stored
        self._making_room: deque[tuple[BlockBatch, int]] = deque()  # waiting for n victims
        self._victims_asked = 0
        self._batches_found = 0
        self._knows_all = False  # about the backend's blocks when it was opened
        self._ended: dict[RequestId, None] = {}  # the latest, oldest first

    def is_idle(self) -> bool:
        """Return whether nothing waits and nothing is at the backend."""
        return self._jobs.is_idle() and not self._making_room

    def audit(self) -> TierAudit:
        """Return the known contents, frozen. For tests and diagnosis: it costs O(n)."""
        return TierAudit(
            capacity=self._capacity,
            mark=self._mark,
            since=self._since,
            knows_generation=self._knows_generation,
            resident=frozenset(self._resident),
            old=frozenset(self._old),
            storing=dict(self._storing),
            coming=frozenset(self._coming),
            removing=frozenset(self._removing),
            in_use=dict(self._in_use),
            leftovers=frozenset(self._leftovers),
            leftovers_are_deferred=self._leftovers.is_deferred,
        )

    # --- messages from the link ---

    def _enter(self, mark: bytes, since: int) -> None:
        """Serve the generation with that mark from now on, and no other.

        It may be the same one, left and entered again by the engine: the link
        has forgotten its blocks.
        """
        if since == self._since and self._knows_generation:
            return
        is_first, self._knows_generation = not self._knows_generation, True
        left, self._mark = self._mark, mark
        comes_anew = since != self._since
        self._since = since
        if comes_anew:
            self._coming.update(self._storing.keys() & self._resident)
            self._old.leave(left, self._resident)
            self._resident = set()
            self.policy.post(m.Cleared())
            known = self._old.of(mark)
            if known:
                self.driver.post(d.AnnounceContents(known))
        if is_first:
            # Not earlier: the generation decides which blocks are useful and which are in the way.
            self.driver.post(d.AnnounceContents(()))

    def _probe(self, message: wire.Probe) -> None:
        self._enter(message.mark, message.since)
        keys = marked(message.keys, message.mark)
        known = tuple(key for key in keys if key in self._old)
        if known:
            self._admit_found(known)
        if self._knows_all or self._resident.issuperset(keys):
            self._answer_probe(message.probe, keys)
        else:
            self._jobs.probe(RunningProbe(message))

    def _answer_probe(self, probe: int, keys: tuple[Key, ...]) -> None:
        present = tuple(key in self._resident for key in keys)
        self.link.post(wire.ProbeAnswer(probe=probe, present=present))

    def _begin(self, message: wire.LoadJob | wire.StoreJob) -> None:
        self._enter(message.mark, message.since)
        job = TierJob(message)
        if not job.keys:
            self._answer(job)
            return
        if job.is_load:
            self._hold(job.keys)
        self._jobs.add(job)
        self._start_batches()

    def _touch_keys(self, message: wire.TouchKeys) -> None:
        keys = marked(message.keys, self._mark)
        self.policy.post(m.Touched(keys=keys, request=message.request))

    def _request_ended(self, message: wire.RequestEnded) -> None:
        self._ended[message.request] = None
        if len(self._ended) > ENDED_REQUESTS_MAX:
            del self._ended[next(iter(self._ended))]
        order = message.order and marked(message.order, self._mark)
        self.policy.post(wire.RequestEnded(message.request, order))

    def _tick(self, message: wire.Tick) -> None:
        self.policy.post(message)

    # --- batches ---

    def _start_batches(self) -> None:
        self._jobs.start_loads()
        # The removal of an older copy could remove the new one.
        while (batch := self._jobs.next_store(avoid=self._removing)) is not None:
            self._make_room(batch)

    def _batch_ended(self, message: d.BatchEnded) -> None:
        ended = self._jobs.end(message)
        if ended is None:
            return
        batch, outcomes = ended
        if isinstance(batch, ProbeSlice):
            if not batch.probe.unended:  # the found blocks have been reported already
                self._answer_probe(batch.probe.id, batch.probe.keys)
            return
        if not batch.slices:
            self._removing.difference_update(batch.keys)
            self._leftovers.end_removal(outcomes)
            self._remove_leftovers()
            self._start_batches()  # a store may have waited for it
            return
        self._removing.difference_update(batch.remove)
        if batch.remove:
            if outcomes.count(Outcome.FAILED) == len(outcomes):
                self._leave(batch.remove)  # it may have failed before they were removed
            self._remove_leftovers()
        for job_slice, ends in end_slices(batch, outcomes, message):
            if job_slice.job.is_load:
                self._note_loaded(job_slice.keys, ends)
            else:
                self._note_stored(job_slice.job, job_slice.keys, ends)
            if not job_slice.job.unended:
                self._answer(job_slice.job)
        self._start_batches()

    def _answer(self, job: TierJob) -> None:
        """Report a job's end, now that each of its blocks has an outcome."""
        self.link.post(job.ended())
        if job.is_load:
            self._release(job.keys)
            return
        done, _ = _split(job.keys, job.outcomes)
        self._release(done)
        if job.since == self._since and not self._resident.issuperset(done):
            # Blocks that a load found damaged meanwhile were lost before they were announced.
            self._announce(removed=tuple(key for key in done if key not in self._resident))
        if job.request in self._ended:
            # The policy was notified of its end before these blocks, so notify it again.
            self.policy.post(wire.RequestEnded(request=job.request, order=None))

    # --- contents ---

    def _make_room(self, batch: BlockBatch) -> None:
        """Have victims chosen for blocks that don't fit; the batch continues in ``_victims``."""
        self._leftovers.wanted(batch.keys)
        self._storing.update(batch.keys)
        self._coming.update(set(batch.keys) - self._resident)
        self._hold(batch.keys)
        missing = max(0, self._used() - self._capacity)
        batch.also_remove(self._old.pop(missing, self._in_use))
        self._removing.update(batch.remove)
        missing -= len(batch.remove)
        self._making_room.append((batch, missing))
        self._victims_asked += missing
        # Asked even for none: a batch must not overtake one that waits for its victims.
        self.policy.post(m.ChooseVictims(count=missing, excluded=frozenset()))

    def _victims(self, message: m.Victims) -> None:
        # Answers come in the order of the requests: both mailboxes are queues.
        batch, asked = self._making_room.popleft()
        self._victims_asked -= asked
        victims = message.keys
        if not self._in_use.keys().isdisjoint(victims):
            # The policy may have chosen before it knew which blocks are in use now.
            in_use = [key for key in victims if key in self._in_use]
            in_use_here = tuple(key for key in in_use if key in self._resident)
            if in_use_here:
                self.policy.post(m.Restored(keys=in_use_here))
            victims = tuple(key for key in victims if key not in self._in_use)
        if victims:
            announced = tuple(key for key in victims if key in self._resident)
            self._forget(victims)
            self._announce(removed=announced, for_room=True)
        # They may have been chosen before a generation ended, whose blocks now all go first.
        victims += self._old.pop(self._used() - self._capacity, self._in_use)
        batch.also_remove(victims + self._leftovers.pop_deferred())
        self._removing.update(batch.remove)
        self._jobs.send_store(batch)

    def _used(self) -> int:
        """Return how many blocks there are, or will be, once the requested victims are gone."""
        assert len(self._coming) <= len(self._storing)
        stored = len(self._resident) + len(self._old) + len(self._coming)
        return stored - self._victims_asked

    def _announce(
        self,
        added: tuple[Key, ...] = (),
        removed: tuple[Key, ...] = (),
        *,
        for_room: bool = False,
    ) -> None:
        """Report gained and lost blocks of the engine's generation to the link."""
        if added or removed:
            added, removed = unmarked(added, self._mark), unmarked(removed, self._mark)
            self.link.post(wire.PresenceChanged(added, removed, self._since, for_room))

    def _new_policy(self, message: wire.PolicyBroke | wire.PolicyReturned) -> None:
        self.link.post(message)
        self.policy.post(m.Residents(keys=tuple(self._resident), held=tuple(self._in_use)))

    def _note_stored(
        self, job: TierJob, keys: tuple[Key, ...], outcomes: tuple[Outcome, ...]
    ) -> None:
        done, not_done = _split(keys, outcomes)
        ended = _count_down(self._storing, keys)
        self._coming.difference_update(ended)
        fresh = tuple(dict.fromkeys(done))
        if not self._resident.isdisjoint(fresh):
            fresh = tuple(key for key in fresh if key not in self._resident)
        if job.mark != self._mark:
            self._old.add(fresh)
        elif fresh:
            self._add(fresh)
            self.policy.post(m.Admitted(keys=fresh, request=job.request, held=True))
            if job.since != self._since:  # The link takes the job's end for another generation's.
                self._announce(added=fresh)
        if not_done:
            self._release(not_done)
            ends = zip(keys, outcomes, strict=True)
            self._leftovers.doubt(key for key, end in ends if end is Outcome.FAILED)
        self._leave(self._leftovers.settle(ended))

    def _note_loaded(self, keys: tuple[Key, ...], outcomes: tuple[Outcome, ...]) -> None:
        if outcomes.count(Outcome.DONE) == len(outcomes):
            return
        gone = (Outcome.ABSENT, Outcome.DAMAGED)
        ends = list(zip(keys, outcomes, strict=True))
        self._lose(tuple(key for key, end in ends if end in gone))
        # The driver has removed them, but does not report whether that worked.
        self._leave(key for key, end in ends if end is Outcome.DAMAGED)

    def _contents_found(self, message: d.ContentsFound) -> None:
        """Admit blocks from before. Their requests are unknown: each batch counts as a run.

        Blocks that no longer fit, since stores continue meanwhile, are removed: else uncounted.
        """
        if message.again:  # They count already; some may have gone since.
            known = (key for key in message.keys if key in self._old)
            fresh = [key for key in known if mark_of(key) == self._mark]
        else:
            fresh = self._found(message.keys)
            self._remove_leftovers()
        if fresh:
            self._admit_found(tuple(fresh))

    def _contents_announced(self, _message: d.ContentsAnnounced) -> None:
        self._knows_all = True

    def _found(self, keys: Sequence[Key]) -> list[Key]:
        """Count blocks from before; return those of the engine's generation that there is room for.

        Blocks of other generations, which can't be served, make room for them.
        """
        fresh: list[Key] = []
        room = self._capacity - self._used()
        for key in dict.fromkeys(keys):
            if any(key in held for held in (self._resident, self._removing, self._leftovers)):
                continue
            is_of_this = mark_of(key) == self._mark
            if key not in self._coming and key not in self._old:
                if room > 0:
                    room -= 1
                else:
                    out = self._old.pop(1, self._in_use) if is_of_this else (key,)
                    self._leftovers.add(out or (key,))
                    if not out or key in out:
                        continue
            if is_of_this:
                fresh.append(key)
            else:
                self._old.add((key,))
        return fresh

    def _admit_found(self, keys: tuple[Key, ...]) -> None:
        self._batches_found += 1
        request = f"found {self._batches_found}"
        self._add(keys)
        self.policy.post(m.Admitted(keys=keys, request=request, held=False))
        held = tuple(key for key in keys if key in self._in_use)
        if held:
            self.policy.post(m.Held(keys=held))
        self.policy.post(wire.RequestEnded(request=request, order=None))
        self._announce(added=keys)

    def _leave(self, keys: Iterable[Key]) -> None:
        """Have these removed later, unless they count, or are being stored."""
        self._leftovers.defer(
            key
            for key in keys
            if not (key in self._resident or key in self._storing or key in self._old)
        )

    def _remove_leftovers(self) -> None:
        keys = self._leftovers.begin_removal()
        if keys:
            self._removing.update(keys)
            self._jobs.remove(keys)

    def _contents_lost(self, message: d.ContentsLost) -> None:
        self._lose(message.keys)

    def _lose(self, keys: tuple[Key, ...]) -> None:
        self._old.discard(keys)
        lost = tuple(key for key in keys if key in self._resident)
        if lost:
            self._forget(lost)
            self.policy.post(m.Gone(keys=lost))
            self._announce(removed=lost)

    def _add(self, keys: tuple[Key, ...]) -> None:
        assert mark_of(keys[0]) == self._mark, "a block of another generation"
        self._resident.update(keys)
        self._old.discard(keys)
        self._coming.difference_update(keys)

    def _forget(self, keys: tuple[Key, ...]) -> None:
        self._old.discard(keys)
        self._resident.difference_update(keys)
        if not self._storing.keys().isdisjoint(keys):
            self._coming.update(key for key in keys if key in self._storing)

    def _hold(self, keys: tuple[Key, ...]) -> None:
        """Keep keys from being chosen while they are loaded, stored, or not yet reported."""
        if not keys:
            return
        self._in_use.update(keys)
        self.policy.post(m.Held(keys=keys))

    def _release(self, keys: tuple[Key, ...]) -> None:
        loose = _count_down(self._in_use, keys)
        if loose:
            self.policy.post(m.Unheld(keys=tuple(loose)))


def _split(
    keys: tuple[Key, ...], outcomes: Sequence[Outcome]
) -> tuple[tuple[Key, ...], tuple[Key, ...]]:
    """Return the keys that are DONE, and the others."""
    if outcomes.count(Outcome.DONE) == len(keys):
        return keys, ()
    done = [outcome is Outcome.DONE for outcome in outcomes]
    return tuple(compress(keys, done)), tuple(compress(keys, map(not_, done)))


def _count_down(counter: Counter[Key], keys: tuple[Key, ...]) -> list[Key]:
    """Decrement the count of each key. Return the keys whose count fell to zero."""
    ended = []
    for key in keys:
        left = counter[key] - 1
        if left > 0:
            counter[key] = left
        else:
            counter.pop(key, None)  # in half the time of ``del``, which Counter overrides
            ended.append(key)
    return ended
