"""Runs a secondary tier without a capacity of its own: only its backend knows the contents.

Others may write to its storage and delete from it, so nothing is remembered here:
each probe goes to the backend, and nothing is evicted. The actor runs in the tier cell,
next to the driver of its backend (``kvtier/tier/job_runner.py``).

A load that finds a block gone or damaged reports it: a damaged one is removed. A store or a
probe in flight meanwhile may have seen the block before, and does not know that it is gone.

Keys carry the mark of their generation on this side of the link
(``kvtier/core/generations.py``), but not on the other. Blocks that this engine stored with
unnamed weights are removed once no engine finds them (``kvtier/tier/dead_blocks.py``).

# Invariant: every job that came in is answered once, whatever the backend does, unless the
#            backend never returns. Checked: end, ended,
#            p8_late_doubled_and_unknown_completions_are_counted_and_otherwise_ignored.
"""

from __future__ import annotations

from itertools import compress
from typing import TYPE_CHECKING, Final, TypeAlias

from kvtier.core import wire
from kvtier.core.actor import Actor, Mailbox
from kvtier.core.generations import ORIGINAL, mark_of, marked, unmarked
from kvtier.plugin_api.backend import Outcome
from kvtier.tier import driver_messages as d
from kvtier.tier.batching import TierJob
from kvtier.tier.dead_blocks import DeadBlocks
from kvtier.tier.job_runner import JobRunner, end_slices
from kvtier.tier.probes import ProbeSlice, RunningProbe

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet

    from kvtier.core.wire import Message
    from kvtier.plugin_api.backend import BackendTraits
    from kvtier.plugin_api.keys import Key

    Claim: TypeAlias = TierJob | RunningProbe
    """A store or a probe: its answer lists blocks that are there."""


FINISH_S: Final = 2.0
"""How long an ending engine keeps removing, once its storage has responded. The rest is left to
``kvtier purge --dead``."""


class Claims:
    """The claims in flight, and the blocks found to be gone since each of them began."""

    def __init__(self) -> None:
        self._gone: dict[Claim, set[Key]] = {}

    def begin(self, claim: Claim) -> None:
        """Track blocks found to be gone from now on."""
        self._gone[claim] = set()

    def note(self, gone: frozenset[Key]) -> None:
        """Count these as gone, even if claims in flight report them present."""
        for claim, keys in self._gone.items():
            keys.update(gone.intersection(claim.claimed()))

    def end(self, claim: Claim) -> AbstractSet[Key]:
        """Return the blocks that are gone though the claim may report them present."""
        return self._gone.pop(claim)


class UnboundedTier(Actor):
    """The tier-cell end of one tier whose backend has no capacity."""

    def __init__(self, name: str, traits: BackendTraits, *, link: Mailbox, driver: Mailbox) -> None:
        others = (wire.TouchKeys, wire.RequestEnded, wire.Tick)
        super().__init__(
            f"tier:{name}",
            {
                **dict.fromkeys(others, self._pass_over),
                wire.GenerationBegan: lambda x: self._enter(x.mark, x.epoch),
                d.ContentsLost: lambda x: self._lose(frozenset(x.keys)),
                wire.Probe: self._probe,
                wire.LoadJob: self._begin,
                wire.StoreJob: self._begin,
                d.BatchEnded: self._batch_ended,
                wire.RequestOpened: self._tell_driver,
                wire.RequestClosed: self._tell_driver,
                wire.PrefixHits: self._prefix_hits,
                wire.BlocksWanted: self._blocks_wanted,
                wire.BlocksMissing: self._blocks_missing,
            },
        )
        self.link = link
        self._driver = driver
        self._jobs = JobRunner(traits, driver)
        self._claims = Claims()
        self._dead = DeadBlocks()
        self._is_finishing = False
        self._finish_by_s: float | None = None  # on the clock of ``BatchEnded.at``
        self._mark = ORIGINAL  # of the generation that the engine is in
        self._since = 0  # the epoch in which it began

    def is_idle(self) -> bool:
        """Return whether nothing waits and nothing is at the backend."""
        return self._jobs.is_idle()

    def finish(self) -> None:
        """Begin to remove blocks that no engine finds once this one has ended. Idempotent."""
        if not self._is_finishing:
            self._is_finishing = True
            self._dead.leave()
            self._remove_dead()

    def _remove_dead(self) -> None:
        keys = self._dead.begin_removal()
        if keys:
            self._jobs.remove(keys)

    def _pass_over(self, _message: Message) -> None:
        """Do nothing: the message is for an eviction policy."""

    def _tell_driver(self, message: Message) -> None:
        """Pass on a message about requests to the backend."""
        self._driver.post(message)

    def _prefix_hits(self, message: wire.PrefixHits) -> None:
        self._driver.post(wire.PrefixHits(message.request, marked(message.keys, self._mark)))

    def _blocks_wanted(self, message: wire.BlocksWanted) -> None:
        """Request the blocks of the engine's generation; it has no others."""
        ours = tuple(key for key in message.keys if mark_of(key) == self._mark)
        if ours:
            keys = unmarked(ours, self._mark)
            self.link.post(wire.BlocksWanted(message.request, keys, self._since))
        others = tuple(key for key in message.keys if mark_of(key) != self._mark)
        if others:
            self._driver.post(wire.BlocksMissing(message.request, others))

    def _blocks_missing(self, message: wire.BlocksMissing) -> None:
        """Pass on the missing blocks. Requests of an older generation give up by themselves."""
        if message.keys:
            self._driver.post(wire.BlocksMissing(message.request, marked(message.keys, self._mark)))

    def _enter(self, mark: bytes, since: int) -> None:
        """Note the engine's generation. Each job and probe repeats it."""
        if mark != self._mark:
            self._dead.leave()
        self._mark, self._since = mark, since
        self._remove_dead()

    def _probe(self, message: wire.Probe) -> None:
        """Have the backend probed. A probe of no block is answered at once."""
        self._enter(message.mark, message.since)
        if message.keys:
            probe = RunningProbe(message)
            self._claims.begin(probe)
            self._jobs.probe(probe)
        else:
            self.link.post(wire.ProbeAnswer(probe=message.probe, present=()))

    def _begin(self, message: wire.LoadJob | wire.StoreJob) -> None:
        self._enter(message.mark, message.since)
        job = TierJob(message)
        if not job.keys:
            self.link.post(job.ended())
            return
        if not job.is_load:
            self._claims.begin(job)
        self._jobs.add(job)
        self._start_batches()

    def _start_batches(self) -> None:
        self._jobs.start_loads()
        while (batch := self._jobs.next_store()) is not None:
            self._jobs.send_store(batch)

    def _batch_ended(self, message: d.BatchEnded) -> None:
        ended = self._jobs.end(message)
        if ended is None:
            return
        batch, outcomes = ended
        if isinstance(batch, ProbeSlice):
            if not batch.probe.unended:
                self.link.post(batch.probe.answer(self._claims.end(batch.probe)))
            return
        if not batch.slices:
            self._removal_ended(message.at)
            return
        for job_slice, ends in end_slices(batch, outcomes, message):
            if job_slice.job.is_load:
                self._lose(_gone(job_slice.keys, ends))
            else:
                done = (end is Outcome.DONE for end in ends)
                stored = compress(job_slice.keys, done)
                self._dead.stored(stored, job_slice.job.mark, self._mark)
            if not job_slice.job.unended:
                self._answer(job_slice.job)
        self._start_batches()

    def _removal_ended(self, at_s: float) -> None:
        self._dead.end_removal()
        if self._is_finishing and self._finish_by_s is None:
            self._finish_by_s = at_s + FINISH_S
        if self._finish_by_s is None or at_s < self._finish_by_s:
            self._remove_dead()

    def _answer(self, job: TierJob) -> None:
        """Report a job's end, now that each of its blocks has an outcome."""
        self.link.post(job.ended())
        if not job.is_load:
            self._tell_gone(self._claims.end(job))

    def _lose(self, gone: frozenset[Key]) -> None:
        if gone:
            self._claims.note(gone)
            self._tell_gone(gone)

    def _tell_gone(self, gone: AbstractSet[Key]) -> None:
        """Report the lost blocks of the engine's generation: the link tracks no other's."""
        ours = tuple(sorted(key for key in gone if mark_of(key) == self._mark))
        if ours:
            self.link.post(wire.PresenceChanged((), unmarked(ours, self._mark), self._since))


def _gone(keys: tuple[Key, ...], outcomes: tuple[Outcome, ...]) -> frozenset[Key]:
    """Return the blocks that a load did not find, or found damaged and so removed."""
    if outcomes.count(Outcome.DONE) == len(outcomes):
        return frozenset()
    both = zip(keys, outcomes, strict=True)
    gone = (Outcome.ABSENT, Outcome.DAMAGED)
    return frozenset(key for key, outcome in both if outcome in gone)
