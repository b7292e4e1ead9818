"""Tracks the work that engine and tiers still have to do for requests decided on earlier.

Part of the primary tier's actor. vLLM does not report when it has computed a request, and it may
not be known yet which of a request's blocks a tier has to load. So a decision counts as work for as
long as it was expected to take when it was made: its real outcome does not matter for long.

Times are seconds of the runtime's clock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvtier.engine.decide.load_decision import Estimates

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvtier.core.load_messages import LoadCost
    from kvtier.engine.decide.load_decision import Cut, Rates
    from kvtier.engine.primary.requests import Request

LOADING_MAX: Final = 64
"""Limit on loading requests considered, the oldest: a decision must be quick."""


class PrefillBacklog:
    """Tracks the decisions for requests that have no first token yet."""

    def __init__(self) -> None:
        self._computed_at = 0.0  # when the engine will have computed all that was decided
        self._loaded_at: dict[Request, float] = {}
        self._owed: dict[int, tuple[int, float]] = {}  # by tier: blocks to load, and as of when

    def estimates(
        self, request: Request, rates: Rates, costs: Mapping[int, LoadCost], now: float
    ) -> Estimates:
        """Return the estimates that a decision for ``request`` is based on."""
        waiting = {each: at for each, at in self._loaded_at.items() if at > now and each.is_weighed}
        waiting.pop(request, None)
        self._loaded_at = waiting
        return Estimates(
            rates,
            {tier: self._behind_others(tier, cost, now) for tier, cost in costs.items()},
            max(0.0, self._computed_at - now),
            tuple(at - now for at in list(waiting.values())[:LOADING_MAX]),
        )

    def _behind_others(self, tier: int, cost: LoadCost, now: float) -> LoadCost:
        blocks, since = self._owed.get(tier, (0, now))
        if blocks and cost.block_s > 0:
            blocks -= int((now - since) / cost.block_s)
        return cost if blocks <= cost.outstanding else cost._replace(outstanding=blocks)

    def add(
        self, request: Request, cut: Cut, compute_s: float, estimates: Estimates, now: float
    ) -> None:
        """Count this decision for later ones: the engine computes for ``compute_s`` of it."""
        if cut.blocks:
            self._loaded_at[request] = now + cut.load_s
        for tier, count in cut.counts:
            cost = estimates.costs.get(tier)
            if cost is not None:
                self._owed[tier] = (cost.outstanding + count, now)
        self._computed_at = max(self._computed_at, now) + compute_s
