"""Decides whether a request loads the blocks of its prefix that tiers have, or computes them.

Part of the primary tier's actor. A decision is made once for each request and wait, when
the first of its blocks would be looked up at a tier, and before anything is looked up,
allocated or evicted for it. From then on tiers count as not having the blocks
behind the cut (``Search.declined``), so that lookups need not change.

The cost of computing is learnt from the engine's steps (``decide/prefill_speed.py``), that
of loading from each link's jobs (``decide/transfer_estimate.py``). Until the first is
known, nothing is decided, and requests load. A tier without measurements is assumed to take
no time, but its loads are waited for no longer than computing would take: it may hang.
A declined tier is tried with a few blocks now and then (``decide/reprobing.py``).

A decision counts the work that engine and tiers still have to do for requests decided on earlier.
vLLM does not report when it has computed a request, and it may not be known yet which of a
request's blocks a tier has to load. So a decision counts as work for as long as it was expected to
take when it was made: its real outcome does not matter for long.

Times are seconds of the runtime's clock.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import groupby, islice, takewhile
from typing import TYPE_CHECKING, Any, Final

from kvtier.core import messages as m
from kvtier.core.messages import SPREADS
from kvtier.engine.decide.load_decision import (
    FREE,
    NOWHERE,
    Estimates,
    Run,
    best_cut,
    best_prefix,
)
from kvtier.engine.decide.prefill_speed import PrefillSpeed
from kvtier.engine.decide.reprobing import Reprobing

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvtier.core.actor import Mailbox
    from kvtier.core.messages import GroupKeys, LoadCost, TokenPlace
    from kvtier.engine.account.sources import Account
    from kvtier.engine.decide.load_decision import Cut, Rates
    from kvtier.engine.primary.promotions import Promotions
    from kvtier.engine.primary.requests import Request
    from kvtier.engine.primary.slot_table import SlotTable
    from kvtier.engine.primary.tier_directory import TierDirectory
    from kvtier.plugin_api.keys import Key
    from kvtier.settings.runtime_config import RuntimeConfig


LONGER: Final = 2.0
"""A request waits for a load at most this many times as long as planned."""

EXPLORED_BLOCKS_MAX: Final = 16
EXPLORING_SHARE: Final = 0.05
"""A request waits at most this share of its computing time for blocks that it loads only to measure
a tier's current speed."""

NOTICE_S: Final = 10.0
"""Shortest interval between two logged changes of mind about one tier."""

LOADING_MAX: Final = 64
"""Limit on loading requests considered, the oldest: a decision must be quick."""


class LoadDecisions:
    """Tracks the costs of loading and computing, and decides between them."""

    def __init__(
        self,
        config: RuntimeConfig,
        slots: SlotTable,
        directory: TierDirectory,
        promotions: Promotions,
        account: Account,
        log: Mailbox,
    ) -> None:
        self._slot_of = slots.slot_of
        self._directory = directory
        self._promotions = promotions
        self.account = account
        self.counts = account.primary
        self._log = log
        self._names = [tier.name for tier in config.tiers]
        self._wait_timeout_s = config.wait_timeout_s
        #: whether requests may compute what tiers have, once the engine's speed is known
        self.decides = config.load_policy == "auto" and bool(config.tiers)
        self._speed = PrefillSpeed(config.prefill_tokens_per_s)
        self._queue = PrefillBacklog()
        self._costs: dict[int, LoadCost | None] = {}
        self._declined: dict[int, Reprobing] = {}  # the tiers that the latest decision declined
        self._noticed_at: dict[int, float] = {}

    def handlers(self) -> dict[type[Any], Callable[[Any], None]]:
        """Return the handler of each message type that the primary tier delegates to this."""
        return {m.LoadCostLearned: self._cost_learned, m.StepComputed: self._step_computed}

    @property
    def wants_places(self) -> bool:
        """Whether there is anything to decide now, so that lookups should pass their place."""
        return self.decides and self._speed.rates is not None

    def _cost_learned(self, message: m.LoadCostLearned) -> None:
        self._costs[message.tier] = message.cost

    def _step_computed(self, message: m.StepComputed) -> None:
        expected_s = self._speed.step(message.tokens, message.attention, message.seconds)
        if expected_s is not None and message.seconds is not None:
            self.counts.prefill_expected_seconds += expected_s
            self.counts.prefill_seconds += message.seconds

    def prefill_s(self, first: int, end: int) -> float:
        """Return the time to compute these tokens of a prompt; 0 while that is not known."""
        rates = self._speed.rates
        return 0.0 if rates is None else rates.seconds(first, end)

    # --- deciding ---

    def weigh(self, keys: Sequence[Key], request: Request, place: TokenPlace, now: float) -> None:
        """Decide how many of these keys, from the first on, the request loads.

        If the first one would be loaded, and tiers have yet to report whether they have it, nothing
        is decided: most keys that are looked up are nowhere.
        """
        estimates = self._estimates(request, now)
        if estimates is None:
            return
        is_known = self._directory.is_known(keys[0], request.search)
        if not is_known:  # then usually none is: no need to check each
            tier = self._directory.seen_at(keys[0], request.search)
            if best_cut([Run(tier, len(keys))], place, estimates).blocks:
                return
        runs = []
        slot_of, seen_at, search = self._slot_of, self._directory.seen_at, request.search
        places = (FREE if key in slot_of else seen_at(key, search) for key in keys)
        for tier, same in groupby(places):
            if tier == NOWHERE:
                break
            runs.append(Run(tier, len(list(same))))
        cut = best_cut(runs, place, estimates)
        if cut.blocks and not is_known:
            return
        request.mark_decided()
        kept = cut.keys
        if cut.all_blocks:
            kept = self._decided(runs, cut, request, estimates)
            self._decline(keys[kept : sum(run.length for run in runs)], request)
            self._have_wait_for_room(cut, request, estimates)
        first, end = (place.first_token + each * place.chunk_tokens for each in (kept, len(keys)))
        self._queue.add(request, cut, estimates.rates.seconds(first, end), estimates, now)

    def weigh_groups(
        self, groups: Sequence[GroupKeys], tokens: int, request: Request, place: tuple[int, float]
    ) -> int:
        """Decide how much of a prefix of several KV-cache groups is loaded; return its tokens.

        ``place``: the number of tokens that the GPU has, and the time now.
        """
        first_token, now = place
        estimates = self._estimates(request, now)
        if estimates is None:
            return tokens
        request.mark_decided()
        slot_of, seen_at, search = self._slot_of, self._directory.seen_at, request.search

        def where(key: Key) -> int:
            return FREE if key in slot_of else seen_at(key, search)

        cut = best_prefix(groups, tokens, where, first_token, estimates)
        end = max(end for group in groups for end in group.ends)
        compute_s = estimates.rates.seconds(max(cut.keys, first_token), end)
        self._queue.add(request, cut, compute_s, estimates, now)
        if not cut.all_blocks:
            return tokens
        runs = [Run(where(key), 1) for group in groups for key in group.needed(tokens) or ()]
        kept = self._decided(runs, cut, request, estimates)
        if kept and not cut.keys:  # to measure the tier: a part of one group would be useless
            return tokens
        for group in groups if cut.keys < tokens else ():
            self._decline(group.keys[bisect_right(group.ends, cut.keys) :], request)
        return cut.keys

    def _estimates(self, request: Request, now: float) -> Estimates | None:
        """Return the inputs of a decision for ``request``; None: nothing is to be decided."""
        rates = self._speed.rates if self.decides else None
        if rates is None:
            return None
        if self._directory.is_apart(request.search.request):
            request.mark_decided()  # it came with parameters for a tier: a router has decided
            return None
        return self._queue.estimates(request, rates, self._costs_now(), now)

    def _costs_now(self) -> dict[int, LoadCost]:
        """Return the known costs, behind all loads that tiers have or are about to be sent."""
        unsent = self._promotions.unsent_counts()
        return {
            tier: cost._replace(outstanding=cost.outstanding + unsent.get(tier, 0))
            for tier, cost in self._costs.items()
            if cost is not None
        }

    def _decided(
        self, runs: Sequence[Run], cut: Cut, request: Request, estimates: Estimates
    ) -> int:
        """Record a decision; return how many keys are kept, which may differ from the cut's."""
        tier = next(run.where for run in runs if run.where != FREE)
        stalled_s = cut.load_s * (1 + SPREADS * estimates.spread())
        # If it loads nothing, it may still have to: blocks may be evicted before it reads them.
        spared_s = cut.saved_s if cut.blocks else cut.compute_s
        patience_s = max(estimates.computed_s + spared_s, stalled_s)
        request.wait_for_loads(patience_s, LONGER * patience_s)
        if cut.blocks:
            if cut.blocks == cut.all_blocks:
                self.counts.loads_decided += 1
            else:
                self.counts.cuts_decided += 1
            if self._declined.pop(tier, None):
                self._notice("blocks are loaded again", tier, cut)
            return cut.keys
        if self._is_reprobed(tier, cut):
            patience_s = EXPLORING_SHARE * cut.compute_s
            request.wait_for_loads(patience_s, patience_s)
            self.counts.explorations_decided += 1
            free = takewhile(lambda run: run.where == FREE, runs)
            length = next(run.length for run in runs if run.where != FREE)
            return sum(run.length for run in free) + min(length, EXPLORED_BLOCKS_MAX)
        self.counts.recomputes_decided += 1
        return cut.keys

    def _is_reprobed(self, tier: int, cut: Cut) -> bool:
        """Return whether a request that declines a tier loads a few blocks, to measure it."""
        now, cost = self._promotions.now, self._costs_now().get(tier)
        if cost is None:
            return False
        reprobing = self._declined.get(tier)
        if reprobing is not None:
            return reprobing.try_if_due(now, cost)
        self._declined[tier] = Reprobing(now)
        self._notice("blocks are recomputed rather than loaded", tier, cut)
        return False

    def _notice(self, event: str, tier: int, cut: Cut) -> None:
        """Log a change of mind about a tier, either way."""
        now = self._promotions.now
        if now - self._noticed_at.get(tier, -NOTICE_S) < NOTICE_S:
            return
        self._noticed_at[tier] = now
        detail = (
            f"loading {cut.all_blocks} takes about {cut.all_load_s:.2g} s, "
            f"computing them {cut.compute_s:.2g} s"
        )
        self._log.post(m.Notice(event, self._names[tier], detail, level="info"))

    def _have_wait_for_room(self, cut: Cut, request: Request, estimates: Estimates) -> None:
        """Have ``request`` wait for slots that others hold, while loading later beats computing."""
        if not estimates.costs or self._promotions.leases_of(request.search.request):
            return  # no tier's cost is known yet; or its loads were begun before anything was known
        alone = {tier: cost._replace(outstanding=0) for tier, cost in estimates.costs.items()}
        load_s = estimates._replace(costs=alone).load_s(dict(cut.counts))
        wait_s = estimates.computed_s + cut.saved_s - load_s
        if cut.blocks and wait_s > 0:
            until = self._promotions.now + min(wait_s, self._wait_timeout_s)
            request.wait_for_room(cut.blocks, until)

    def _decline(self, keys: Sequence[Key], request: Request) -> None:
        declined = [key for key in keys if key not in self._slot_of]
        self.counts.blocks_recomputed += len(declined)
        request.search.decline(declined)


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
        behind_others = {}
        for tier, cost in costs.items():
            blocks, since = self._owed.get(tier, (0, now))
            left = blocks - (now - since) / cost.block_s if cost.block_s else blocks
            behind_others[tier] = cost._replace(outstanding=int(max(left, cost.outstanding)))
        self._loaded_at = {
            each: at
            for each, at in self._loaded_at.items()
            if at > now and each.is_weighed and each is not request
        }
        return Estimates(
            rates,
            behind_others,
            max(0.0, self._computed_at - now),
            tuple(at - now for at in islice(self._loaded_at.values(), LOADING_MAX)),
        )

    def add(
        self, request: Request, cut: Cut, compute_s: float, estimates: Estimates, now: float
    ) -> None:
        """Count this decision for later ones: the engine computes for ``compute_s``."""
        if cut.blocks:
            self._loaded_at[request] = now + cut.load_s
        for tier, count in cut.counts:
            if tier in estimates.costs:
                self._owed[tier] = (estimates.costs[tier].outstanding + count, now)
        self._computed_at = max(self._computed_at, now) + compute_s
