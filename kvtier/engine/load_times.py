"""How long a tier's loads take: what its link learns from jobs, and tells the primary tier.

Part of a link's actor, whose clock is that of its Ticks. The end of a job counts as of the
first Tick after it: until then the scheduler can't have used its blocks.

# Invariant: what is outstanding are the blocks of the promotions in flight.
#            Checked: ended, load_times_count_what_is_in_flight.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtier.core import messages as m
from kvtier.engine.transfer_estimate import TransferEstimate

if TYPE_CHECKING:
    from kvtier.core.actor import Mailbox
    from kvtier.core.load_messages import LoadCost
    from kvtier.core.statistics import TierCounts
    from kvtier.engine.in_flight import Job


class LoadTimes:
    """Of one tier."""

    def __init__(self, number: int, counts: TierCounts, primary: Mailbox) -> None:
        """``number``: the tier's."""
        self._number = number
        self._counts = counts
        self._primary = primary
        self._estimate = TransferEstimate()
        self._told: LoadCost | None = None
        self._ended: list[Job] = []  # since the last Tick, whole
        self.outstanding = 0  #: blocks at the tier, or on their way there and back

    def sent(self, job: Job) -> None:
        """Note that a promotion was sent."""
        self.outstanding += len(job.slots)
        job.wait_behind(self.outstanding)

    def ended(self, job: Job, *, is_whole: bool) -> None:
        """Note that a promotion has ended, late or not. ``is_whole``: with all its blocks."""
        self.outstanding -= len(job.slots)
        assert self.outstanding >= 0, "a promotion ended that was not sent"
        if is_whole:
            self._ended.append(job)

    def given_up(self, job: Job, now: float) -> None:
        """Note that nobody waits for a promotion any more: it takes too long."""
        self._estimate.given_up(job.backlog, now - job.started, now)

    def forget(self) -> None:
        """Note that another cell serves the tier: nothing is outstanding, nothing known of it."""
        self._estimate = TransferEstimate()
        self._ended.clear()
        self.outstanding = 0

    def pass_time(self, now: float) -> None:
        """Learn from what has ended, and tell what a load takes now."""
        for job in self._ended:
            seconds = now - job.started
            expected = self._estimate.seconds(job.backlog)
            if expected is not None:
                self._counts.load_expected_seconds += expected
                self._counts.load_seconds += seconds
            self._estimate.took(job.backlog, seconds, now)
        self._ended.clear()
        cost = self._estimate.cost(self.outstanding)
        if cost != self._told:
            self._told = cost
            self._primary.post(m.LoadCostLearned(self._number, cost))
