"""Where to cut a prefix: its head is loaded from tiers, its tail recomputed.

The time until a request's first token, where its first ``j`` keys are loaded and the
rest of what tiers have is computed, is::

    max over tiers (latency + seconds per block * (outstanding + blocks of it))
    + linear * (tokens computed) + quadratic * (end² - (tokens before them)²)

Loads from several tiers run side by side. What is in the primary tier already costs
nothing. While blocks of one tier follow one another, this is concave on either side
of the point where that tier becomes the slowest of them, so the best cut is at an end of such
a run, or at that point: there is no need to look at the others.
"""

from __future__ import annotations

from math import ceil, floor, inf
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from kvtier.core.load_messages import LoadCost, Place

FREE: Final = -3
"""As a place of blocks: the primary tier, or under way to it."""

_ALIKE: Final = 1e-9  # of seconds: a tie


class Run(NamedTuple):
    """Keys that follow one another, and are at the same place."""

    where: int  #: a tier's number, or ``FREE``
    length: int  #: in keys


class Cut(NamedTuple):
    """The best cut of a prefix, and what was expected of it."""

    keys: int  #: that are loaded, or free
    blocks: int  #: of these, from tiers
    load_s: float  #: what loading them takes
    saved_s: float  #: what computing them would take
    all_blocks: int  #: what tiers have of the whole prefix
    all_load_s: float  #: what loading all takes
    compute_s: float  #: what computing all takes


class Rates(NamedTuple):
    """What computing takes: seconds a token, and for each of ``n² + 2 n c``."""

    linear: float
    quadratic: float

    def seconds(self, first: int, end: int) -> float:
        """Return what the tokens from ``first`` to ``end`` take."""
        return self.linear * (end - first) + self.quadratic * (end * end - first * first)


def best_cut(runs: Sequence[Run], costs: Mapping[int, LoadCost], place: Place, rates: Rates) -> Cut:
    """Return the best cut. Where two are alike, the one that loads more.

    A tier of which no cost is known is thought to cost nothing: it is loaded from.
    """
    total = sum(run.length for run in runs)
    end = place.first_token + total * place.chunk_tokens
    best_s, best = inf, (0, 0.0, 0)
    whole = (0, 0.0, 0)
    for keys, load_s, blocks in _candidates(runs, costs):
        first = place.first_token + keys * place.chunk_tokens
        seconds = load_s + rates.seconds(first, end)
        whole = (keys, load_s, blocks)
        if seconds <= best_s + _ALIKE * max(1.0, seconds):
            best_s, best = min(seconds, best_s), whole
    keys, load_s, blocks = best
    return Cut(
        keys,
        blocks,
        load_s,
        rates.seconds(place.first_token, place.first_token + keys * place.chunk_tokens),
        whole[2],
        whole[1],
        rates.seconds(place.first_token, end),
    )


def _candidates(
    runs: Sequence[Run], costs: Mapping[int, LoadCost]
) -> Iterator[tuple[int, float, int]]:
    """Yield cuts: keys, what loading them takes, and how many are from tiers. They grow."""
    keys = blocks = 0
    counts: dict[int, int] = {}
    yield 0, 0.0, 0
    for where, count in runs:
        if where != FREE:
            before = counts.get(where, 0)
            others_s = loads_s({**counts, where: 0}, costs)
            for more in _bends(before, count, costs.get(where), others_s):
                taken = {**counts, where: before + more}
                yield keys + more, loads_s(taken, costs), blocks + more
            counts[where] = before + count
            blocks += count
        keys += count
        yield keys, loads_s(counts, costs), blocks


def _bends(before: int, count: int, cost: LoadCost | None, others_s: float) -> Iterator[int]:
    """Yield how many blocks of a run may be loaded while the other tiers' loads go on."""
    if cost is None or cost.block_s <= 0:
        return
    within = (others_s - cost.latency_s) / cost.block_s - cost.outstanding - before
    if 0 < within < count:
        for more in {floor(within), ceil(within)}:
            if 0 < more < count:
                yield more


def loads_s(counts: Mapping[int, int], costs: Mapping[int, LoadCost]) -> float:
    """Return what loads from several tiers take that are sent together."""
    return max(
        (costs[tier].seconds(count) for tier, count in counts.items() if tier in costs),
        default=0.0,
    )
