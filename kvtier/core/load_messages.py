"""Defines messages about the cost of loads, and of computing the blocks instead.

Like those in ``kvtier/core/messages.py``, but they never leave the engine cell.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from kvtier.core.message import Message

SPREADS: Final = 3.0
"""A load that takes so many spreads longer than expected counts as stalled."""


class TokenPlace(NamedTuple):
    """Position of a lookup's keys in their request. Tokens before them are on the GPU."""

    first_token: int
    chunk_tokens: int  #: tokens that each key covers


class LoadCost(NamedTuple):
    """An estimate, as a value: how long a load from a tier would take now."""

    latency_s: float
    block_s: float  #: for each block that is outstanding at the tier, its own included
    outstanding: int  #: blocks that the tier has been sent, and has not released
    spread: float  #: its recent error, as a share of the estimate

    def seconds(self, blocks: int) -> float:
        """Return how long a load of so many blocks takes, if it is sent now."""
        if not blocks:
            return 0.0
        return self.latency_s + self.block_s * (self.outstanding + blocks)

    def patience_s(self, blocks: int, least_s: float, most_s: float) -> float:
        """Return how long to wait for so many blocks: until they are stalled, within limits.

        ``least_s`` for blocks that are not expected within ``most_s``.
        """
        expected_s = self.seconds(blocks)
        if expected_s >= most_s:
            return least_s
        return max(least_s, min(expected_s * (1 + SPREADS * self.spread), most_s))


class LoadCostLearned(Message, frozen=True, gc=False):
    """Link → primary tier: how long a load from the tier takes now; None: not known."""

    tier: int
    cost: LoadCost | None


class StepComputed(Message, frozen=True, gc=False):
    """Facade → primary tier: prompt tokens that a step computed, and the time since the last step.

    ``attention``: the sum, over requests, of ``n² + 2 n c`` for ``n`` tokens behind ``c``.
    ``seconds``: None if the engine had nothing to compute for some of the time.
    """

    tokens: int
    attention: int
    seconds: float | None
