"""A secondary tier without a capacity of its own: its backend says what there is.

Others may write to its storage and delete from it, so nothing is remembered here:
each probe goes to the backend, and nothing is evicted. The actor runs in the tier cell,
next to the driver of its backend (``kvtier/tier/job_runner.py``).

Keys have the mark of their generation in them on this side of the link
(``kvtier/core/generations.py``), and not on the other.

# Invariant: every job that came in is answered once, whatever the backend does, unless the
#            backend never returns. Checked: end, ended,
#            p8_late_doubled_and_unknown_completions_are_counted_and_otherwise_ignored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtier.core import messages as m
from kvtier.core.actor import Actor, Mailbox
from kvtier.core.generations import marked
from kvtier.plugin_api.backend import Outcome
from kvtier.tier.batching import Job
from kvtier.tier.job_runner import JobRunner, end_slices

if TYPE_CHECKING:
    from kvtier.core.messages import Message
    from kvtier.plugin_api.backend import BackendTraits


class UnboundedTier(Actor):
    """The tier-cell end of one tier whose backend has no capacity."""

    def __init__(self, name: str, traits: BackendTraits, *, link: Mailbox, driver: Mailbox) -> None:
        others = (m.GenerationBegan, m.TouchKeys, m.RequestEnded, m.Tick, m.ContentsLost)
        super().__init__(
            f"tier:{name}",
            {
                **dict.fromkeys(others, self._pass_over),
                m.Probe: self._probe,
                m.LoadJob: self._begin,
                m.StoreJob: self._begin,
                m.BatchEnded: self._batch_ended,
            },
        )
        self.link = link
        self._jobs = JobRunner(traits, driver)

    def is_idle(self) -> bool:
        """Tell whether nothing waits and nothing is at the backend."""
        return self._jobs.is_idle()

    def _pass_over(self, _message: Message) -> None:
        """Do nothing: it is for an eviction policy, or for a tier that knows its contents."""

    def _probe(self, message: m.Probe) -> None:
        """Have the backend asked. Asked of no block, the tier answers at once."""
        if message.keys:
            self._jobs.probe(message.probe, marked(message.keys, message.mark))
        else:
            self.link.post(m.ProbeAnswer(probe=message.probe, present=()))

    def _begin(self, message: m.LoadJob | m.StoreJob) -> None:
        job = Job(message)
        if job.keys:
            self._jobs.add(job)
            self._start_batches()
        else:
            self.link.post(job.ended())

    def _start_batches(self) -> None:
        self._jobs.start_loads()
        while (batch := self._jobs.next_store()) is not None:
            self._jobs.send_store(batch)

    def _batch_ended(self, message: m.BatchEnded) -> None:
        ended = self._jobs.end(message)
        if ended is None:
            return
        batch, outcomes = ended
        if not batch.slices:
            present = tuple(outcome is Outcome.DONE for outcome in outcomes)
            self.link.post(m.ProbeAnswer(probe=batch.probe, present=present))
            return
        for job_slice, _ in end_slices(batch, outcomes, message.seconds):
            if not job_slice.job.unended:
                self.link.post(job_slice.job.ended())
        self._start_batches()
