"""Computes the gain of each size, and recommends sizes.

The curve is a policy's hit ratio at a ladder of capacities, by replay. It ends
at the endless cache: all of the trace's blocks.

- The **knee** is where the curve is furthest above the straight line from
  nothing to the endless cache, both axes scaled to 1. Before it, a byte gains more than the average
  byte; behind it, less.
- Tiers hold copies: blocks in DRAM are also on the disk behind it. So several tiers together have
  the hits of the largest of them, and each is sized on the same curve.
- With prices, the cheapest tier gets the knee, or without one the endless cache. Each more
  expensive one then gets the size with the best gain for its price: the point of the curve furthest
  above the line from zero to the tier below, the axes being the hits and the price of the tier
  below. But it holds at least the largest request, or that request could never be hit whole.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

GIB: Final = 2**30


class SizePoint(NamedTuple):
    """One point of the curve."""

    blocks: int
    hit_ratio: float


class Workfacts(NamedTuple):
    """Facts of the trace besides its curve."""

    block_bytes: int
    block_tokens: int
    requests: int
    references: int
    largest_request_blocks: int


class TierAdvice(NamedTuple):
    """One tier, its size and its hits."""

    name: str
    blocks: int
    hit_ratio: float  #: of this tier and all before it
    own_hit_ratio: float  #: of the misses of the tiers before it
    price_per_gib: float | None


def knee(points: Sequence[SizePoint], *, cost_of_end: float, cost_per_block: float) -> int | None:
    """Return the index of the point furthest above the line from zero to the last point.

    The last point's hits and ``cost_of_end`` are 1 on their axes. None if no
    point is above the line.
    """
    hits = points[-1].hit_ratio
    if not hits:
        return None
    heights = [
        point.hit_ratio / hits - point.blocks * cost_per_block / cost_of_end for point in points
    ]
    best = max(range(len(points)), key=heights.__getitem__)
    return best if heights[best] > 0 else None


def knee_of_curve(points: Sequence[SizePoint]) -> int | None:
    """Return the index of the curve's knee; its last point is the endless cache."""
    return knee(points, cost_of_end=points[-1].blocks, cost_per_block=1.0)


def advise(
    points: Sequence[SizePoint], prices: Mapping[str, float], facts: Workfacts
) -> list[TierAdvice]:
    """Return a size for each priced tier, the most expensive (assumed the fastest) first.

    Of tiers at the same price, the one that is named first.
    None at all if no size has a hit. Without a knee, the endless cache has the best gain.
    """
    if not points[-1].hit_ratio:
        return []
    by_price = sorted(prices.items(), key=lambda item: item[1], reverse=True)[::-1]
    top = knee_of_curve(points)
    sizes: list[tuple[str, float, int]] = []
    for name, price in by_price:
        if not sizes:
            chosen = top if top is not None else len(points) - 1
        else:
            _, price_below, below = sizes[-1]
            best = knee(
                points[: below + 1],
                cost_of_end=points[below].blocks * price_below or 1.0,
                cost_per_block=price,
            )
            least = _first_that_holds(points, facts.largest_request_blocks)
            chosen = min(below, max(best or 0, least))
        sizes.append((name, price, chosen))
    return tier_table([(name, points[chosen], price) for name, price, chosen in reversed(sizes)])


def tier_table(tiers: Sequence[tuple[str, SizePoint, float | None]]) -> list[TierAdvice]:
    """Return the hits of each tier, given fastest first with its point on the curve."""
    table = []
    before = 0.0
    for name, point, price in tiers:
        together = max(before, point.hit_ratio)
        table.append(TierAdvice(name, point.blocks, together, together - before, price))
        before = together
    return table


def saved_by_a_gib_more(points: Sequence[SizePoint], facts: Workfacts) -> list[float | None]:
    """For each point: the prompt tokens per 1,000 requests that one more GiB saves."""
    saved: list[float | None] = []
    for here in points[:-1]:
        more = _hit_ratio_at(points, here.blocks + GIB / facts.block_bytes) - here.hit_ratio
        saved.append(1000 * more * facts.references * facts.block_tokens / facts.requests)
    return [*saved, None]


def _hit_ratio_at(points: Sequence[SizePoint], blocks: float) -> float:
    """Return the hit ratio on the straight lines between the points."""
    for here, larger in pairwise(points):
        if blocks < larger.blocks:
            part = (blocks - here.blocks) / (larger.blocks - here.blocks)
            return here.hit_ratio + part * (larger.hit_ratio - here.hit_ratio)
    return points[-1].hit_ratio


def _first_that_holds(points: Sequence[SizePoint], blocks: int) -> int:
    return next(index for index, point in enumerate(points) if point.blocks >= blocks)
