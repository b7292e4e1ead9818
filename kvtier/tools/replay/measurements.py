"""Measurements of a replay: durations by kind, and events in each interval of time."""

from __future__ import annotations

from array import array
from collections import defaultdict
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvtier.core.statistics import Statistics
    from kvtier.tools.replay.gpu import WrongBlock

PERCENTS: Final = (50, 90, 99)

MISREADS_KEPT_MAX: Final = 20
"""The most wrong blocks that are described; all are counted."""


class Durations:
    """Many durations of one kind, in seconds."""

    def __init__(self, seconds: Iterable[float] = ()) -> None:
        self.seconds = array("d", seconds)

    def add(self, seconds: float) -> None:
        """Add a duration."""
        self.seconds.append(seconds)

    def summary(self) -> dict[str, float | None]:
        """Return count, mean, percentiles and maximum; None where there is nothing.

        A percentile is the smallest value that at least the given percentage does not exceed.
        """
        values = np.frombuffer(self.seconds) if self.seconds else np.empty(0)
        summary: dict[str, float | None] = {"count": len(values)}
        if len(values) == 0:
            return summary | dict.fromkeys(["mean", *(f"p{p}" for p in PERCENTS), "max"])
        found = np.percentile(values, PERCENTS, method="inverted_cdf")
        summary["mean"] = float(values.mean())
        summary |= {f"p{p}": float(value) for p, value in zip(PERCENTS, found, strict=True)}
        summary["max"] = float(values.max())
        return summary


class Misread(NamedTuple):
    """One wrong block, and the request that was to read it."""

    request: str
    source: str  #: the primary tier, or the tier that the block was promoted from
    block: WrongBlock


class Interval:
    """One interval of time. Requests count in that of their first token."""

    def __init__(self, sources: int) -> None:
        self.requests = 0
        self.referenced_blocks = 0
        self.hit_blocks = [0] * sources
        self.first_token = Durations()
        self.resident_blocks: list[int] | None = None  # at its end, by source


class TierMeasured:
    """Measurements of one secondary tier."""

    def __init__(self) -> None:
        self.probe = Durations()  # one a probe
        self.promotion = Durations()  # one a job
        self.cascade = Durations()  # one a block: from complete_store until it was stored
        self.loading_s = 0.0  # with promotions in flight
        self.storing_s = 0.0  # with cascades in flight
        self.evicted_blocks = 0


class ReplayMeasured:
    """Measurements of one run. ``sources``: the primary tier, then the secondary ones."""

    def __init__(self, sources: Sequence[str], interval_s: float, statistics: Statistics) -> None:
        self.sources = tuple(sources)
        self.statistics = statistics  # the latest
        self.interval_s = interval_s
        self.intervals: dict[int, Interval] = {}
        self.tiers = [TierMeasured() for _ in sources[1:]]
        # Of the requests that have had their first token:
        self.requests = 0
        self.input_tokens = 0
        self.gpu_blocks = 0  # in the engine's own prefix cache
        self.gpu_tokens = 0
        self.computed_tokens = 0
        self.referenced_blocks = 0
        self.hit_blocks = [0] * len(sources)
        self.hit_tokens = [0] * len(sources)
        self.first_token = Durations()  # since arrival
        # Of all:
        self.entering = Durations()  # from arrival until the first lookup
        self.waiting = Durations()  # from the first lookup until every result is known
        self.lookup = Durations()  # of one key: a sample that the facade takes
        self.operations = defaultdict[str, Durations](Durations)  # the other calls: time per key
        self.scheduler_s = 0.0  # inside all calls
        self.scheduler = Durations()  # of each request: inside its own calls
        self.gpu_s = 0.0
        self.steps = 0
        self.stores_refused = 0  # stores that found no room, and were retried
        self.wrong_blocks = 0
        self.misreads: list[Misread] = []

    def interval_at(self, now: float) -> Interval:
        """Return the interval that ``now`` is in."""
        number = int(now / self.interval_s)
        interval = self.intervals.get(number)
        if interval is None:
            interval = self.intervals[number] = Interval(len(self.sources))
        return interval

    def note_hit(self, interval: Interval, source: int, tokens: int) -> None:
        """Note that a block, with a number of the prompt's tokens, was found there."""
        self.hit_blocks[source] += 1
        self.hit_tokens[source] += tokens
        interval.hit_blocks[source] += 1

    def note_statistics(self, now: float, statistics: Statistics, resident: list[int]) -> None:
        """Note the runtime's statistics, and the number of blocks of each source."""
        self.statistics = statistics
        self.interval_at(now).resident_blocks = resident  # the last of an interval stays

    def note_operation(self, name: str, seconds: float, keys: int) -> None:
        """Note one call, as its time per key."""
        self.operations[name].add(seconds / keys)
        self.scheduler_s += seconds

    def note_misread(self, misread: Misread) -> None:
        """Note a wrong block."""
        self.wrong_blocks += 1
        if len(self.misreads) < MISREADS_KEPT_MAX:
            self.misreads.append(misread)
