"""What the engine and the tiers have to do for requests that were decided for before another one.

Part of the primary tier's actor. Nobody tells when vLLM has computed a request, and which of a
request's blocks a tier has to load may not be known yet. So it is what was decided, for as long
as it should take by what was expected then: what became of it does not matter for long.

Times are seconds of the runtime's clock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvtier.engine.load_decision import Estimates

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvtier.core.load_messages import LoadCost
    from kvtier.engine.load_decision import Cut, Rates
    from kvtier.engine.requests import Request

LOADING_MAX: Final = 64
"""So many requests that load are looked at, the oldest: a decision must be quick."""


class PrefillBacklog:
    """Knows what was decided for requests that have no first token yet."""

    def __init__(self) -> None:
        self._computed_at = 0.0  # by then the engine has computed what was decided on
        self._loaded_at: dict[Request, float] = {}
        self._owed: dict[int, tuple[int, float]] = {}  # by tier: blocks to load, and when that was

    def outlook(
        self, request: Request, rates: Rates, costs: Mapping[int, LoadCost], now: float
    ) -> Estimates:
        """Return what a decision for ``request`` has to reckon with."""
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
        self, request: Request, cut: Cut, compute_s: float, outlook: Estimates, now: float
    ) -> None:
        """Have later decisions reckon with this one, of which ``compute_s`` are computed."""
        if cut.blocks:
            self._loaded_at[request] = now + cut.load_s
        for tier, count in cut.counts:
            cost = outlook.costs.get(tier)
            if cost is not None:
                self._owed[tier] = (cost.outstanding + count, now)
        self._computed_at = max(self._computed_at, now) + compute_s
