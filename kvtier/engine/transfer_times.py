"""How long a tier takes for work of one kind, and how much of it the tier is given at once.

What is said of the blocks of jobs goes for the keys of probes as well.

Part of a link's actor, whose clock is that of its Ticks. A job takes until its tier has ended it,
as its tier tells: not until the next Tick, which is late where the engine computes for long, and
the more requests compute since loads seem slow. Without a time that can be true it is the Tick.

The tier is given what it works off in a short time, or until the link has looked a few times, or
in twice its latency, whichever is longest: enough to keep it busy, and no more, since what it was
given can neither be put in another order nor be withdrawn. Each of its threads has a block, though.
A tier that nothing is known of is given what a slow one works off before it would count as stalled.

How much that is, is no matter of the estimate, which can't tell latency from throughput while all
jobs are about as long. It becomes less only if a job shows that what was outstanding with it took
longer, and more if it took less than half of that while the tier had as much as it may have.

# Invariant: what is outstanding are the blocks of the jobs in flight.
#            Checked: on_end, transfer_times_count_what_is_in_flight.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvtier.core.statistics import TierSpeed
from kvtier.engine.transfer_estimate import TransferEstimate

if TYPE_CHECKING:
    from kvtier.core.load_messages import LoadCost
    from kvtier.engine.jobs import Sent

WINDOW_S: Final = 0.1
"""The tier has work for so long, at least."""

LATENCIES: Final = 2.0
"""In units of its latency: the tier has work for so long, if it is slow to answer."""

LOOKS: Final = 4.0
"""In units of the time between two Ticks: a job may have been sent one before it was noted, and
its end is seen with the next."""

BLOCK_S_MIN: Final = 1e-9
"""What a fit says beside a latency may be as good as nothing: then only the latency shows."""

LOOK_S_MAX: Final = 1.0
LOOK_HALF_LIFE_S: Final = 5.0
"""An engine that has nothing to compute looks often, until it computes a prompt again."""

WINDOW_BLOCKS_MAX: Final = 1 << 20

SLOWER: Final = 4.0
"""Work may take so many times as long as expected, beside the limit of its tier."""


class TransferTimes:
    """Of one tier, and of its loads or its stores."""

    def __init__(self, first_blocks: int, limit_s: float) -> None:
        """``first_blocks``: what a tier is given of which nothing is known.

        ``limit_s``: how long the tier may do nothing before it is late.
        """
        self._limit_s = limit_s
        self._first_blocks = first_blocks
        self._calls_max = 1
        self.window = first_blocks  #: how many blocks the tier is given at once
        self._now = 0.0
        self._look_s = 0.0  # between two Ticks, lately, while the tier had something to do
        self._estimate = TransferEstimate()
        self._speed: TierSpeed | None = None  # as it was told last; None: it has changed since
        self._ended: list[tuple[Sent, float]] = []  # since the last Tick, whole, and when
        self.outstanding = 0  #: blocks at the tier, or on their way there and back
        self._lost = 0  # of these, in jobs that the tier is late with
        self._allowance_s = 0.0  # what the tier may take beside its limit, as it may just be slow

    def set_calls_max(self, calls_max: int) -> None:
        """Learn how many calls of this kind the tier's backend may do at once."""
        self._calls_max = calls_max

    @property
    def late_after_s(self) -> float:
        """How long the tier may do nothing before it is late with what it has."""
        return self._limit_s + self._allowance_s

    @property
    def is_idle(self) -> bool:
        """Whether the tier has nothing to do, and all that it has done is noted."""
        return not (self.outstanding or self._ended)

    @property
    def room(self) -> int:
        """How many more blocks the tier is to be given now; not above 0: it has enough."""
        return self.window - (self.outstanding - self._lost)

    def on_sent(self, job: Sent, now: float) -> None:
        """Note that a job is sent."""
        if self.is_idle:  # then nobody looked
            self._note_look(now)
        self.outstanding += job.size
        job.start(now, self.outstanding)
        expected_s = self._estimate.seconds(self.outstanding) or 0.0
        self._allowance_s = min(SLOWER * expected_s, self._limit_s)

    def on_end(self, job: Sent, *, is_whole: bool, at: float = 0.0) -> None:
        """Note that a job has ended, late or not. ``is_whole``: with all its blocks.

        ``at``: when that was, by the tier's clock, which should be the link's.
        """
        self.outstanding -= job.size
        assert self.outstanding >= 0, "a job ended that was not sent"
        if not job.counts_for_its_tier:
            self._lost -= job.size
        if is_whole:
            self._ended.append((job, at))

    def given_up(self, job: Sent, now: float) -> None:
        """Note that nobody waits for a job any more: it takes too long."""
        self._estimate.given_up(job.backlog, now - job.started, now)
        self._speed = None

    def on_lost(self, job: Sent) -> None:
        """Note that the tier is late with a job: it does not keep others from being sent."""
        self._lost += job.size

    def forget(self) -> None:
        """Note that another cell serves the tier: nothing is outstanding, nothing known of it."""
        self._estimate = TransferEstimate()
        self._speed = None
        self.window = self._first_blocks
        self._ended.clear()
        self.outstanding = self._lost = 0

    def pass_time(self, now: float) -> tuple[float, float]:
        """Learn from what has ended; return what that was expected to take, and what it took.

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
        """Learn from a job, with which so many blocks were outstanding, how much is enough."""
        latencies_s = LATENCIES * self._estimate.latency_s
        enough_s = max(WINDOW_S, LOOKS * self._look_s, latencies_s)
        if seconds > enough_s:
            block_s = seconds / blocks
            one_a_call = min(self._calls_max, self._first_blocks, int(self._limit_s / 2 / block_s))
            self.window = min(self.window, max(2, one_a_call, int(enough_s / block_s)))
        elif 2 * seconds < enough_s and 2 * blocks >= self.window:
            self.window = min(2 * self.window, WINDOW_BLOCKS_MAX)

    def speed(self, unit_bytes: int | None) -> TierSpeed | None:
        """Return what is known; None: nothing. ``unit_bytes``: of a block; None: of a probe.

        It is the same object until more is known.
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
        """Return what is known of the tier, with so many blocks that wait in front of it."""
        return self._estimate.cost(self.outstanding + waiting)
