"""Counts the requests for one prompt's blocks, if the tier's backend counts requests."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from kvtier.tools.bench.call_legs import LOAD, STORE, batches_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from kvtier.tools.bench.tier_sides import BackendSide

PROMPT_BLOCKS: Final = 500
LOOKUP: Final = "lookup"
STEPS: Final = (LOOKUP, STORE, LOAD)
_REQUESTS: Final = "requests_"

PromptRequests = dict[str, dict[str, int]]
"""Requests of each kind in each step; empty if the backend counts none."""


async def count_requests(side: BackendSide, blocks: int) -> PromptRequests:
    """Look a new prompt up, store it, load it, and remove it. ``blocks``: of a leg.

    Raises ``StoreFault``.
    """
    if not any(name.startswith(_REQUESTS) for name in side.counters()):
        return {}
    # Each part is a leg of its own, which stores from the same slots under other names.
    parts = [
        (-part, batches_of(len(numbers), side.shape(STORE).blocks))
        for part, numbers in enumerate(batches_of(PROMPT_BLOCKS, blocks), start=1)
    ]
    found: PromptRequests = {}
    for step in STEPS:
        before = Counter(_requests(side))
        for leg, batch in _each(parts):
            await (side.probe(leg, batch) if step == LOOKUP else side.call(step, leg, batch))
        found[step] = dict(Counter(_requests(side)) - before)
    for leg, batch in _each(parts):
        await side.remove(leg, batch)
    return found


def _requests(side: BackendSide) -> Mapping[str, int]:
    counts = side.counters().items()
    return {n.removeprefix(_REQUESTS): count for n, count in counts if n.startswith(_REQUESTS)}


def _each(
    parts: Sequence[tuple[int, Sequence[Sequence[int]]]],
) -> Iterable[tuple[int, Sequence[int]]]:
    return ((leg, batch) for leg, batches in parts for batch in batches)


def requests_shown(requests: PromptRequests) -> str:
    """Return it in one line."""
    steps = (
        f"{step} " + (", ".join(f"{count} {kind}" for kind, count in kinds.items()) or "none")
        for step, kinds in requests.items()
    )
    return "; ".join(steps)
