"""Where a prefix is cut, against looking at every cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.core.messages import LoadCost, TokenPlace
from kvtier.engine.decide.load_decision import FREE, Estimates, Rates, Run, best_cut

RUNS = st.lists(
    st.builds(Run, where=st.sampled_from([FREE, 0, 1, 2]), length=st.integers(1, 12)), max_size=7
)
SECONDS = st.one_of(st.just(0.0), st.floats(1e-4, 10.0))
COSTS = st.dictionaries(
    st.integers(0, 2),
    st.builds(LoadCost, SECONDS, SECONDS, st.integers(0, 30), st.floats(0.1, 2.0)),
)
RATES = st.builds(Rates, st.floats(0.0, 1.0), st.one_of(st.just(0.0), st.floats(1e-6, 0.1)))
PLACES = st.builds(TokenPlace, st.integers(0, 200), st.integers(1, 64))


def seconds_of(
    keys: int, runs: list[Run], costs: dict[int, LoadCost], place: TokenPlace, rates: Rates
) -> float:
    """Return the time until the first token with one cut, if nobody else asks for anything."""
    places = [run.where for run in runs for _ in range(run.length)]
    counts = {tier: places[:keys].count(tier) for tier in costs}
    load_s = max((costs[tier].seconds(count) for tier, count in counts.items()), default=0.0)
    first = place.first_token + keys * place.chunk_tokens
    end = place.first_token + len(places) * place.chunk_tokens
    spread = max((cost.spread for cost in costs.values()), default=0.0)
    load_s *= (1 + (1 + spread**2) ** 0.5) / 2
    return load_s + rates.linear * (end - first) + rates.quadratic * (end**2 - first**2)


@given(runs=RUNS, costs=COSTS, place=PLACES, rates=RATES)
def test_no_cut_is_better_than_the_best(
    runs: list[Run], costs: dict[int, LoadCost], place: TokenPlace, rates: Rates
) -> None:
    """So it is never worse than loading all, nor than recomputing all."""
    total = sum(run.length for run in runs)
    every = [seconds_of(keys, runs, costs, place, rates) for keys in range(total + 1)]
    cut = best_cut(runs, place, Estimates(rates, costs))
    assert every[cut.keys] == pytest.approx(min(every), rel=1e-6, abs=1e-6)


@given(runs=RUNS, costs=COSTS, place=PLACES)
def test_a_tie_loads(runs: list[Run], costs: dict[int, LoadCost], place: TokenPlace) -> None:
    """Where neither takes any time, all is loaded."""
    free = {tier: LoadCost(0.0, 0.0, 0, 0.1) for tier in costs}
    cut = best_cut(runs, place, Estimates(Rates(0.0, 0.0), free))
    assert cut.keys == sum(run.length for run in runs)
    assert cut.blocks == cut.all_blocks


def test_a_fast_tier_is_loaded_from_and_a_slow_one_behind_it_is_not() -> None:
    costs = {0: LoadCost(0.0, 1e-5, 0, 0.1), 1: LoadCost(5.0, 1.0, 0, 0.1)}
    runs = [Run(FREE, 3), Run(0, 20), Run(1, 5)]
    cut = best_cut(runs, TokenPlace(0, 16), Estimates(Rates(1e-4, 0.0), costs))
    assert (cut.keys, cut.blocks, cut.all_blocks) == (23, 20, 25)


def test_what_waits_at_a_tier_counts() -> None:
    rates = Rates(1e-3, 0.0)
    idle, busy = LoadCost(0.0, 1e-3, 0, 0.1), LoadCost(0.0, 1e-3, 10_000, 0.1)
    assert best_cut([Run(0, 10)], TokenPlace(0, 16), Estimates(rates, {0: idle})).keys == 10
    assert best_cut([Run(0, 10)], TokenPlace(0, 16), Estimates(rates, {0: busy})).keys == 0


SLOW = {0: LoadCost(0.0, 0.02, 0, 0.1)}
QUICKER = Rates(1e-3, 0.0)  # 0.016 s a block


def test_while_the_engine_is_busy_a_slower_tier_loads_for_nothing() -> None:
    assert best_cut([Run(0, 100)], TokenPlace(0, 16), Estimates(QUICKER, SLOW)).keys == 0
    cut = best_cut([Run(0, 100)], TokenPlace(0, 16), Estimates(QUICKER, SLOW, computed_s=1.0))
    assert 40 < cut.keys <= 50  # and not up to the last moment, for it may take longer


def test_nobody_is_made_to_wait_for_what_is_loaded_nearly_as_soon() -> None:
    """Five loads end while this request would be computed; then all of them would wait for it."""
    loading = Estimates(QUICKER, SLOW, loads_end_s=(0.1, 0.2, 0.3, 0.4, 0.5))
    assert best_cut([Run(0, 100)], TokenPlace(0, 16), loading).keys == 100
    later = Estimates(QUICKER, SLOW, loads_end_s=(2.1, 2.2, 2.3, 2.4, 2.5))
    assert best_cut([Run(0, 100)], TokenPlace(0, 16), later).keys == 0
