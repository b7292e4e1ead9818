"""Limits the work of one kind that a tier is given at once, by the time that it takes.

The keys of probes are treated like the blocks of jobs.

The tier is given the work that it completes in a short time, during a few looks of the link, or in
twice its latency, whichever is longest. That keeps it busy, and more would be harmful: work at the
tier can be neither reordered nor withdrawn. But each of its threads gets a block. A tier of unknown
speed is given the work that a slow one completes before it would count as stalled.

That limit does not follow from the estimate, which can't separate latency and throughput while all
jobs are about equally long. It falls only if a job shows that the work outstanding with it took
longer, and rises if it took less than half the time while the tier had at least half the limit.

Part of a link's actor, whose clock is that of its Ticks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvtier.core.statistics import TierSpeed
from kvtier.engine.decide.transfer_estimate import TransferEstimate

if TYPE_CHECKING:
    from kvtier.core.messages import LoadCost

WINDOW_S: Final = 0.1
"""The tier is given work for at least this long."""

LATENCIES: Final = 2.0
"""In units of its latency: a tier that is slow to answer is given work for this long."""

LOOKS: Final = 4.0
"""In units of the time between two looks of the link: the tier may take up a job one later, and
the job's end is seen at the next."""

BLOCK_S_MIN: Final = 1e-9
"""A smaller fitted time per block counts as zero: then only the latency is reported."""

LOOK_S_MAX: Final = 1.0
LOOK_HALF_LIFE_S: Final = 5.0
"""An idle engine looks often, until it computes a prompt again."""

WINDOW_BLOCKS_MAX: Final = 1 << 20

SLOWER: Final = 4.0
"""Work may take this many times as long as expected, on top of its tier's limit."""


class Pacing:
    """The pace of one kind of work at one tier."""

    def __init__(self, first_blocks: int, limit_s: float) -> None:
        """``first_blocks``: how many blocks a tier of unknown speed is given.

        ``limit_s``: how long the tier may do nothing before it is late.
        """
        self.limit_s = limit_s  #: as configured; ``late_after_s`` allows for a slow tier
        self._first_blocks = first_blocks
        self._calls_max = 1
        self.window = first_blocks  #: how many blocks the tier is given at once
        self._looked_at = 0.0
        self._look_s = 0.0  # between two recent looks with work
        self._estimate = TransferEstimate()
        self._speed: TierSpeed | None = None  # as last returned; None: it has changed since
        self._allowance_s = 0.0  # beyond the limit: the tier may just be slow

    def set_calls_max(self, calls_max: int) -> None:
        """Set how many calls of this kind the tier's backend may do at once."""
        self._calls_max = calls_max

    @property
    def late_after_s(self) -> float:
        """How long the tier may do nothing before its work is late."""
        return self.limit_s + self._allowance_s

    def allow(self, outstanding: int) -> None:
        """Allow for the time that a slow tier takes for the outstanding blocks."""
        expected_s = self._estimate.seconds(outstanding) or 0.0
        self._allowance_s = min(SLOWER * expected_s, self.limit_s)

    def restart(self) -> None:
        """Forget what was learnt: a new cell may serve the tier."""
        self._estimate = TransferEstimate()
        self._speed = None
        self.window = self._first_blocks

    def look(self, now: float, *, is_busy: bool) -> None:
        """Note that the link looks for ended work, and whether the tier has had work."""
        passed_s, self._looked_at = now - self._looked_at, now
        self._look_s *= 0.5 ** (passed_s / LOOK_HALF_LIFE_S)
        if is_busy:
            self._look_s = max(min(passed_s, LOOK_S_MAX), self._look_s)

    def learn(self, blocks: int, seconds: float, seen_s: float, now: float) -> float | None:
        """Learn from work that ended; return the seconds expected of it, None if unknown.

        ``blocks``: outstanding when it was sent, with its own; ``seen_s``: until its end was seen.
        """
        expected_s = self._estimate.seconds(blocks)
        self._estimate.observe(blocks, seconds, now)
        self._speed = None
        self._fit_window(blocks, seen_s)
        return expected_s

    def given_up(self, blocks: int, seconds: float, now: float) -> None:
        """Learn from work that has not ended after ``seconds``, and is not waited for any more."""
        self._estimate.given_up(blocks, seconds, now)
        self._speed = None

    def _fit_window(self, blocks: int, seconds: float) -> None:
        """Adapt the window to a job that took ``seconds`` with ``blocks`` outstanding."""
        latencies_s = LATENCIES * self._estimate.latency_s
        enough_s = max(WINDOW_S, LOOKS * self._look_s, latencies_s)
        if seconds > enough_s:
            block_s = seconds / blocks
            one_a_call = min(self._calls_max, self._first_blocks, int(self.limit_s / 2 / block_s))
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

    def cost(self, outstanding: int) -> LoadCost | None:
        """Return the cost of a load behind ``outstanding`` blocks; None: not known yet."""
        return self._estimate.cost(outstanding)
