"""Decides where to cut a prefix: its head is loaded from tiers, its tail recomputed.

The time until a request's first token, if its first keys are loaded and the others computed, is::

    max over tiers (latency + seconds per block * (outstanding + blocks of it)),
        or until the engine has finished its earlier prompts, if that takes longer
    + linear * (tokens computed) + quadratic * (end² - (tokens before them)²)

Added to that is how much longer other requests wait if their loads end meanwhile: while an engine
computes one prompt, requests that need no more than a step must wait.

Blocks that are in the primary tier already cost nothing. Within a run of blocks of one tier, this
is concave on either side of the point where that tier becomes the slowest, so the best cut is at an
end of the run, or at that point: no other cuts are tried.

With several KV-cache groups, a prefix of ``n`` tokens needs blocks of all groups up to token ``n``:
with full attention every block, with a window the last ones. Cuts are tried where the blocks of a
full-attention group change place, and at the end.
"""

from __future__ import annotations

from collections import Counter
from math import ceil, floor, hypot
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from kvtier.core.messages import GroupKeys, LoadCost, TokenPlace
    from kvtier.plugin_api.keys import Key


NOWHERE: Final = -1
"""The place of a block that is in no tier that the request may use."""

ASKING: Final = -2
"""The place of a block that tiers are being probed for."""

FREE: Final = -3
"""The place of blocks that are in the primary tier, or in flight to it."""

CUTS_MAX: Final = 16
"""Limit on the cuts tried for several groups; of more, the last ones are tried."""

_ALIKE: Final = 1e-9  # of seconds: a tie


class Run(NamedTuple):
    """Consecutive keys that are at the same place."""

    where: int  #: a tier's number, or ``FREE``
    length: int  #: in keys


class Cut(NamedTuple):
    """The best cut of a prefix, and its estimates."""

    keys: int  #: number of keys that are loaded, or free
    counts: tuple[tuple[int, int], ...]  #: of these keys, the number from each tier
    load_s: float  #: time to load them
    saved_s: float  #: time to compute them instead
    all_blocks: int  #: blocks of the whole prefix that tiers have
    all_load_s: float  #: time to load all
    compute_s: float  #: time to compute all

    @property
    def blocks(self) -> int:
        """The number of blocks that are loaded from tiers."""
        return sum(count for _, count in self.counts)


class Rates(NamedTuple):
    """The cost of computing: seconds a token, and for each of ``n² + 2 n c``."""

    linear: float
    quadratic: float

    def seconds(self, first: int, end: int) -> float:
        """Return the time to compute the tokens from ``first`` to ``end``."""
        return self.linear * (end - first) + self.quadratic * (end * end - first * first)


class Estimates(NamedTuple):
    """The inputs of a decision. Times are seconds from now."""

    rates: Rates
    costs: Mapping[int, LoadCost]  #: by tier; a missing one is assumed to take no time
    computed_s: float = 0.0  #: until then, the engine computes earlier prompts
    loads_end_s: tuple[float, ...] = ()  #: of the other requests that wait for loads

    def load_s(self, counts: Mapping[int, int]) -> float:
        """Return the time that loads from several tiers take if they are sent together."""
        known = ((self.costs.get(tier), count) for tier, count in counts.items())
        return max((cost.seconds(count) for cost, count in known if cost is not None), default=0.0)

    def spread(self) -> float:
        """Return the largest error of the load estimates, as a share of the estimate."""
        return max((cost.spread for cost in self.costs.values()), default=0.0)

    def seconds(self, load_s: float, compute_s: float) -> float:
        """Return the time to a request's first token, plus how much longer others wait.

        A load that takes about as long as the engine is busy anyway is not free: it may take
        longer. So the expected time of the later of the two counts.
        """
        apart_s = hypot(load_s - self.computed_s, load_s * self.spread())
        begins_s = (load_s + self.computed_s + apart_s) / 2
        ends_s = begins_s + compute_s
        return ends_s + sum(ends_s - each for each in self.loads_end_s if begins_s <= each < ends_s)


def best_cut(runs: Sequence[Run], place: TokenPlace, estimates: Estimates) -> Cut:
    """Return the best cut. Of two equal ones, the one that loads more."""
    first, chunk = place
    cuts = [(keys, first + keys * chunk, of) for keys, of in _candidates(runs, estimates)]
    return _best(cuts, first + sum(run.length for run in runs) * chunk, estimates)


def _candidates(runs: Sequence[Run], estimates: Estimates) -> Iterator[tuple[int, dict[int, int]]]:
    """Yield growing cuts: the number of keys, and how many of them are from each tier."""
    free_s = estimates.computed_s / (1 + estimates.spread())
    keys = 0
    counts: dict[int, int] = {}
    yield 0, {}
    for where, count in runs:
        if where != FREE:
            before, cost = counts.get(where, 0), estimates.costs.get(where)
            if cost is not None and cost.block_s > 0:
                # Some blocks load at no cost while other loads run, or the engine is busy.
                others_s = max(free_s, estimates.load_s({**counts, where: 0}))
                bend = (others_s - cost.latency_s) / cost.block_s - cost.outstanding - before
                bend = min(max(bend, 0.0), count)
                for more in range(max(floor(bend), 1), min(ceil(bend), count - 1) + 1):
                    yield keys + more, {**counts, where: before + more}
            counts = {**counts, where: before + count}
        keys += count
        yield keys, counts


def _best(cuts: Sequence[tuple[int, int, dict[int, int]]], end: int, estimates: Estimates) -> Cut:
    """Return the best of growing cuts, each its length, its last token and its blocks by tier.

    The first one loads nothing, the last one all.
    """
    compute_s = estimates.rates.seconds
    loads_s = [estimates.load_s(counts) for _, _, counts in cuts]
    sums = [
        estimates.seconds(load_s, compute_s(token, end))
        for load_s, (_, token, _) in zip(loads_s, cuts, strict=True)
    ]
    most = min(sums) + _ALIKE * max(1.0, min(sums))
    best = max(number for number, seconds in enumerate(sums) if seconds <= most)
    keys, token, counts = cuts[best]
    first = cuts[0][1]
    return Cut(
        keys,
        tuple(counts.items()),
        loads_s[best],
        compute_s(first, token),
        sum(cuts[-1][2].values()),
        loads_s[-1],
        compute_s(first, end),
    )


def best_prefix(
    groups: Sequence[GroupKeys],
    tokens: int,
    where: Callable[[Key], int],
    first_token: int,
    estimates: Estimates,
) -> Cut:
    """Return the best cut of a prefix of ``tokens``; its ``keys`` count tokens, 0 for none.

    ``where``: the tier that has a block, or ``FREE``. ``first_token``: the GPU has all before it.
    """
    cuts: list[tuple[int, int, dict[int, int]]] = [(0, first_token, {})]
    for end in (*_changes(groups, tokens, where)[-CUTS_MAX:], tokens):
        counts = _needed(groups, end, where)
        if counts is not None:
            cuts.append((end, end, counts))
    return _best(cuts, tokens, estimates)


def _changes(groups: Sequence[GroupKeys], tokens: int, where: Callable[[Key], int]) -> list[int]:
    """Return the tokens before which the blocks of a group without a window change place."""
    found: set[int] = set()
    for group in groups:
        if group.window is None:
            places = [where(key) for key in group.keys]
            found.update(
                end
                for end, here, there in zip(group.ends, places, places[1:], strict=False)
                if here != there and end < tokens
            )
    return sorted(found)


def _needed(
    groups: Sequence[GroupKeys], tokens: int, where: Callable[[Key], int]
) -> dict[int, int] | None:
    """Return how many blocks of a prefix each tier has; None: a needed block is nowhere."""
    needed = [group.needed(tokens) for group in groups]
    if None in needed:
        return None
    counts = Counter(where(key) for keys in needed if keys for key in keys)
    return None if NOWHERE in counts else {tier: n for tier, n in counts.items() if tier != FREE}
