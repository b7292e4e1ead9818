"""Measures how long a tier takes for work of one kind, and limits how much it is given at once.

The keys of probes are treated like the blocks of jobs.

Part of a link's actor, whose clock is that of its Ticks. A job ends at the time that its
tier reports, not at the next Tick. That is late if the engine computes for long: loads would seem
slow, and even more requests would compute. If the reported time can't be true, the Tick's counts.

The tier is given the work that it completes in a short time, during a few looks of the link, or in
twice its latency, whichever is longest. That keeps it busy, and more would be harmful: work at the
tier can be neither reordered nor withdrawn. But each of its threads gets a block. A tier of unknown
speed is given the work that a slow one completes before it would count as stalled.

That limit does not follow from the estimate, which can't separate latency and throughput while all
jobs are about as long. It falls only if a job shows that the work outstanding with it took longer
than that, and rises if it took less than half while the tier had about as much as it may have.

# Invariant: what is outstanding are the blocks of the jobs in flight.
#            Checked: on_end, transfer_times_count_what_is_in_flight.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvtier.core.statistics import TierSpeed
from kvtier.engine.decide.transfer_estimate import TransferEstimate

if TYPE_CHECKING:
    from kvtier.core.messages import LoadCost
    from kvtier.engine.link.jobs import Sent

WINDOW_S: Final = 0.1
"""The tier is given work for at least this long."""

LATENCIES: Final = 2.0
"""In units of its latency: a tier that is slow to answer is given work for this long."""

LOOKS: Final = 4.0
"""In units of the time between two Ticks: a job may have been sent one before it was noted, and
its end is seen at the next."""

BLOCK_S_MIN: Final = 1e-9
"""A smaller fitted time per block counts as zero: then only the latency is reported."""

LOOK_S_MAX: Final = 1.0
LOOK_HALF_LIFE_S: Final = 5.0
"""An idle engine looks often, until it computes a prompt again."""

WINDOW_BLOCKS_MAX: Final = 1 << 20

SLOWER: Final = 4.0
"""Work may take this many times as long as expected, besides the limit of its tier."""


class TransferTimes:
    """The times of one kind of work at one tier."""

    def __init__(self, first_blocks: int, limit_s: float) -> None:
        """``first_blocks``: how many blocks a tier of unknown speed is given.

        ``limit_s``: how long the tier may do nothing before it is late.
        """
        self._limit_s = limit_s
        self._first_blocks = first_blocks
        self._calls_max = 1
        self.window = first_blocks  #: how many blocks the tier is given at once
        self._now = 0.0
        self._look_s = 0.0  # between two recent Ticks with work
        self._estimate = TransferEstimate()
        self._speed: TierSpeed | None = None  # as last returned; None: it has changed since
        self._ended: list[tuple[Sent, float]] = []  # since the last Tick, complete; and the end
        self.outstanding = 0  #: blocks at the tier, or on their way there and back
        self._lost = 0  # of these, in jobs that the tier is late with
        self._allowance_s = 0.0  # beyond the limit: the tier may just be slow

    def set_calls_max(self, calls_max: int) -> None:
        """Set how many calls of this kind the tier's backend may do at once."""
        self._calls_max = calls_max

    @property
    def late_after_s(self) -> float:
        """How long the tier may do nothing before its work is late."""
        return self._limit_s + self._allowance_s

    @property
    def is_idle(self) -> bool:
        """Whether the tier has no work, and all its completed work is recorded."""
        return not (self.outstanding or self._ended)

    @property
    def room(self) -> int:
        """How many more blocks the tier can be given now; 0 or less: it has enough."""
        return self.window - (self.outstanding - self._lost)

    def on_sent(self, job: Sent, now: float) -> None:
        """Note that a job is sent."""
        if self.is_idle:  # no Tick was noted while it was idle
            self._note_look(now)
        self.outstanding += job.size
        job.start(now, self.outstanding)
        expected_s = self._estimate.seconds(self.outstanding) or 0.0
        self._allowance_s = min(SLOWER * expected_s, self._limit_s)

    def on_end(self, job: Sent, *, is_whole: bool, at: float = 0.0) -> None:
        """Note that a job has ended, late or not. ``is_whole``: with all its blocks.

        ``at``: when it ended, by the tier's clock, which should be the link's.
        """
        self.outstanding -= job.size
        assert self.outstanding >= 0, "a job ended that was not sent"
        if not job.counts_for_its_tier:
            self._lost -= job.size
        if is_whole:
            self._ended.append((job, at))

    def given_up(self, job: Sent, now: float) -> None:
        """Note that a job is not waited for any more: it takes too long."""
        self._estimate.given_up(job.backlog, now - job.started, now)
        self._speed = None

    def on_lost(self, job: Sent) -> None:
        """Note that the tier is late with a job, which now does not keep others from being sent."""
        self._lost += job.size

    def forget(self) -> None:
        """Note that a new cell serves the tier: nothing is outstanding, and nothing is known."""
        self._estimate = TransferEstimate()
        self._speed = None
        self.window = self._first_blocks
        self._ended.clear()
        self.outstanding = self._lost = 0

    def pass_time(self, now: float) -> tuple[float, float]:
        """Learn from jobs that have ended; return their expected and their actual seconds.

        While it is idle, this need not be called.
        """
        expected_s = took_s = 0.0
        self._note_look(now)
        for job, at in self._ended:
            seen_s = now - job.started
            seconds = at - job.started if job.started < at < now else seen_s
            expected = self._estimate.seconds(job.backlog)
            if expected is not None:
                expected_s += expected
                took_s += seconds
            self._estimate.observe(job.backlog, seconds, now)
            self._speed = None
            self._fit_window(job.backlog, seen_s)
        self._ended.clear()
        return expected_s, took_s

    def _note_look(self, now: float) -> None:
        passed_s, self._now = now - self._now, now
        self._look_s *= 0.5 ** (passed_s / LOOK_HALF_LIFE_S)
        if self.outstanding or self._ended:
            self._look_s = max(min(passed_s, LOOK_S_MAX), self._look_s)

    def _fit_window(self, blocks: int, seconds: float) -> None:
        """Adapt the window to a job: the time it took with ``blocks`` outstanding."""
        latencies_s = LATENCIES * self._estimate.latency_s
        enough_s = max(WINDOW_S, LOOKS * self._look_s, latencies_s)
        if seconds > enough_s:
            block_s = seconds / blocks
            one_a_call = min(self._calls_max, self._first_blocks, int(self._limit_s / 2 / block_s))
            self.window = min(self.window, max(2, one_a_call, int(enough_s / block_s)))
        elif 2 * seconds < enough_s and 2 * blocks >= self.window:
            self.window = min(2 * self.window, WINDOW_BLOCKS_MAX)

    def speed(self, unit_bytes: int | None) -> TierSpeed | None:
        """Return the speed, None if unknown. ``unit_bytes``: size of a block; None for probes.

        It is the same object until the estimate changes.
        """
        estimate = self._estimate
        if self._speed is not None or not estimate.is_known:
            return self._speed
        block_s = estimate.block_s
        a_second = 1 / block_s if block_s > BLOCK_S_MIN else 0.0
        self._speed = TierSpeed(
            latency_s=estimate.latency_s,
            bytes_per_s=a_second * (unit_bytes or 0),
            answers_per_s=a_second if unit_bytes is None else 0.0,
            spread=estimate.spread,
            window=self.window,
        )
        return self._speed

    def cost(self, waiting: int) -> LoadCost | None:
        """Return the cost of a load behind the outstanding blocks and ``waiting`` more."""
        return self._estimate.cost(self.outstanding + waiting)
