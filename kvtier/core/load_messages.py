"""Messages about what loads cost, and what computing instead of them does.

As those in ``kvtier/core/messages.py``; they never leave the engine cell.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from kvtier.core.message import Message

SPREADS: Final = 3.0
"""A load that takes so many spreads longer than expected is stalled."""


class Place(NamedTuple):
    """Where the keys of a lookup stand in their request. Tokens before them are on the GPU."""

    first_token: int
    chunk_tokens: int  #: that each key covers


class LoadCost(NamedTuple):
    """An estimate, as a value: what a load from a tier would take now."""

    latency_s: float
    block_s: float  #: for each block that is outstanding at the tier, its own included
    outstanding: int  #: blocks that the tier has been sent, and has not released
    spread: float  #: how far off it was lately, as a share of what it said

    def seconds(self, blocks: int) -> float:
        """Return what a load of so many blocks takes, if it is sent now."""
        if not blocks:
            return 0.0
        return self.latency_s + self.block_s * (self.outstanding + blocks)

    def patience_s(self, blocks: int, least_s: float, most_s: float) -> float:
        """Return how long to wait for so many blocks: until they are stalled, within limits.

        ``least_s`` for those that are not expected within ``most_s``.
        """
        expected_s = self.seconds(blocks)
        if expected_s >= most_s:
            return least_s
        return max(least_s, min(expected_s * (1 + SPREADS * self.spread), most_s))


class LoadCostLearned(Message, frozen=True, gc=False):
    """Link → primary tier: what a load from the tier takes now; None: not known."""

    tier: int
    cost: LoadCost | None


class StepComputed(Message, frozen=True, gc=False):
    """Facade → primary tier: what prompts a step computed, and how long after the one before.

    ``attention``: the sum, over requests, of ``n² + 2 n c`` for ``n`` tokens behind ``c``.
    ``seconds``: None where the engine had nothing to compute for some of the time.
    """

    tokens: int
    attention: int
    seconds: float | None
