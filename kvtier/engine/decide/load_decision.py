"""Decides where to cut a prefix: its head is loaded from tiers, its tail recomputed.

The time until a request's first token, if its first ``j`` keys are loaded and the
rest of the tiers' blocks is computed, is::

    max over tiers (latency + seconds per block * (outstanding + blocks of it)),
        or until the engine has finished its earlier prompts, if that takes longer
    + linear * (tokens computed) + quadratic * (end² - (tokens before them)²)

Added to that is how much longer other requests wait if their loads end meanwhile: while an engine
computes one prompt, requests that need no more than a step must wait.

Loads from several tiers run side by side. Blocks that are in the primary tier already cost
nothing. Within a run of blocks of one tier, this is concave on either side
of the point where that tier becomes the slowest, so the best cut is at an end of the
run, or at that point: no other cuts are tried.

Of several KV-cache groups, a prefix of ``n`` tokens needs blocks of all groups up to token ``n``:
with full attention every block, with a window the last ones. Cuts are tried where a group's blocks
change from one place to another, and at the end.
"""

from __future__ import annotations

from collections import Counter
from math import ceil, floor, hypot
from operator import itemgetter
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from kvtier.core.messages import GroupKeys, LoadCost, TokenPlace
    from kvtier.plugin_api.keys import Key


NOWHERE: Final = -1
"""The place of a block that no tier has which the request may use."""

ASKING: Final = -2
"""The place of a block about which tiers are being probed."""

FREE: Final = -3
"""The place of blocks that are in the primary tier, or in flight to it."""

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
    loads_end_s: tuple[float, ...] = ()  #: for the other requests that wait for loads

    def load_s(self, counts: Mapping[int, int]) -> float:
        """Return the time that loads from several tiers take if they are sent together."""
        known = ((self.costs.get(tier), count) for tier, count in counts.items())
        return max((cost.seconds(count) for cost, count in known if cost is not None), default=0.0)

    def load_alone_s(self, counts: Mapping[int, int]) -> float:
        """Return the time that such loads take once tiers have no other work."""
        alone = {tier: cost._replace(outstanding=0) for tier, cost in self.costs.items()}
        return self._replace(costs=alone).load_s(counts)

    def spread(self) -> float:
        """Return the largest error of the load estimates, as a share of the estimate."""
        return max((cost.spread for cost in self.costs.values()), default=0.0)

    def seconds(self, load_s: float, compute_s: float) -> float:
        """Return the time to a request's first token, plus how much longer others wait.

        A load that takes about as long as the engine is busy anyway is not free: it may take
        longer. So the expected value of the later one counts.
        """
        apart_s = hypot(load_s - self.computed_s, load_s * self.spread())
        begins_s = (load_s + self.computed_s + apart_s) / 2
        ends_s = begins_s + compute_s
        return ends_s + sum(ends_s - each for each in self.loads_end_s if begins_s <= each < ends_s)


def best_cut(runs: Sequence[Run], place: TokenPlace, estimates: Estimates) -> Cut:
    """Return the best cut. Of two equal ones, the one that loads more."""
    first, chunk = place
    cuts = [
        (keys, first + keys * chunk, counts, estimates.load_s(counts))
        for keys, counts in _candidates(runs, estimates)
    ]
    return _best(cuts, first + sum(run.length for run in runs) * chunk, estimates)


def _best(
    cuts: Sequence[tuple[int, int, dict[int, int], float]], end: int, estimates: Estimates
) -> Cut:
    """Return the best of growing cuts: its length, its last token, its blocks by tier, their load.

    The first one loads nothing, the last one all.
    """
    compute_s = estimates.rates.seconds
    sums = [estimates.seconds(load_s, compute_s(token, end)) for _, token, _, load_s in cuts]
    least = min(sums)
    least += _ALIKE * max(1.0, least)
    length, token, counts, load_s = max(
        (cut for cut, seconds in zip(cuts, sums, strict=True) if seconds <= least),
        key=itemgetter(0),
    )
    first, (_, _, all_counts, all_load_s) = cuts[0][1], cuts[-1]
    return Cut(
        length,
        tuple(counts.items()),
        load_s,
        compute_s(first, token),
        sum(all_counts.values()),
        all_load_s,
        compute_s(first, end),
    )


def _candidates(runs: Sequence[Run], estimates: Estimates) -> Iterator[tuple[int, dict[int, int]]]:
    """Yield growing cuts: the number of keys, and how many of them are from each tier."""
    free_s = estimates.computed_s / (1 + estimates.spread())
    keys = 0
    counts: dict[int, int] = {}
    yield 0, {}
    for where, count in runs:
        if where != FREE:
            before = counts.get(where, 0)
            others_s = max(free_s, estimates.load_s({**counts, where: 0}))
            for more in _bends(before, count, estimates.costs.get(where), others_s):
                yield keys + more, {**counts, where: before + more}
            counts = {**counts, where: before + count}
        keys += count
        yield keys, counts


def _bends(before: int, count: int, cost: LoadCost | None, others_s: float) -> Iterator[int]:
    """Yield how many blocks of a run can load while other loads, or the engine, are busy."""
    if cost is None or cost.block_s <= 0:
        return
    within = (others_s - cost.latency_s) / cost.block_s - cost.outstanding - before
    if 0 < within < count:
        for more in {floor(within), ceil(within)}:
            if 0 < more < count:
                yield more


CUTS_MAX: Final = 16
"""Limit on cuts that are tried; of more, the last ones."""


def best_prefix(
    groups: Sequence[GroupKeys],
    tokens: int,
    where: Callable[[Key], int],
    first_token: int,
    estimates: Estimates,
) -> Cut:
    """Return the best cut of a prefix of ``tokens``; its ``keys`` count tokens, 0 for none.

    ``where``: the tier that has a block, or ``FREE``. ``first_token``: the GPU has those before.
    """
    cuts: list[tuple[int, int, dict[int, int], float]] = [(0, first_token, {}, 0.0)]
    for end in (*_changes(groups, tokens, where)[-CUTS_MAX:], tokens):
        counts = _needed(groups, end, where)
        if counts is not None:
            cuts.append((end, end, counts, estimates.load_s(counts)))
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
