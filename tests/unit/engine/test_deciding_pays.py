"""Deciding between loading and computing is never much worse than the better of the two.

An engine and a tier are simulated: see ``tests/unit/engine/_simulated_engine.py``.
``stress.bench decide`` asks the same of real engines.
"""

from __future__ import annotations

from itertools import product
from math import inf
from statistics import mean, median
from typing import Final

import pytest

from tests.unit.engine._simulated_engine import COMPUTE_BLOCK_S, HANGS, Prompt, SimulatedEngine

SLOWNESS: Final = (0.005, 0.15, 0.5, 2.0, 5.0)  #: of the tier, where computing is 1
LENGTHS: Final = (1000, 4000)
CLIENTS: Final = (1, 8)
PROMPTS: Final = 8  #: of each length
TURNS_BEFORE, TURNS = 3, 4  #: that are not counted, for the tier changed; and that are
WORSE_MAX: Final = 1.1
NOTICED_WITHIN: Final = 10  # requests


def engine_with(policy: str, slowness: float, lengths: tuple[int, ...]) -> SimulatedEngine:
    engine = SimulatedEngine(policy, slowness * COMPUTE_BLOCK_S)
    for tokens in lengths:
        for number in range(PROMPTS):
            engine.store(Prompt.of(number, tokens))
    return engine


def ask(engine: SimulatedEngine, tokens: int, clients: int, turn: int) -> list[float]:
    engine.forget()
    return engine.serve([Prompt.of((turn + each) % PROMPTS, tokens) for each in range(clients)])


def mean_s(engine: SimulatedEngine, tokens: int, clients: int) -> float:
    turns = [ask(engine, tokens, clients, turn) for turn in range(TURNS_BEFORE + TURNS)]
    return mean(seconds for turn in turns[TURNS_BEFORE:] for seconds in turn)


def test_deciding_is_as_good_as_the_better_choice() -> None:
    """One engine after the other sees tiers that become ever slower."""
    times: dict[str, list[float]] = {}
    for policy in ("always", "recompute", "auto"):
        engine = engine_with(policy, SLOWNESS[0], LENGTHS)
        times[policy] = []
        for slowness in SLOWNESS:
            engine.block_s = slowness * COMPUTE_BLOCK_S
            kinds = list(product(LENGTHS, CLIENTS))
            if policy == "always" and slowness > 1:  # never the better one, and long to simulate
                times[policy] += [inf] * len(kinds)
                continue
            times[policy] += [mean_s(engine, tokens, clients) for tokens, clients in kinds]
    cells = list(product(SLOWNESS, LENGTHS, CLIENTS))
    better = map(min, times["always"], times["recompute"])
    ratios = [auto / best for auto, best in zip(times["auto"], better, strict=True)]
    worse = {cell: ratio for cell, ratio in zip(cells, ratios, strict=True) if ratio > WORSE_MAX}
    assert not worse
    assert median(ratios) <= 1.01
    assert min(ratios) < 0.9, "tier and engine were never both used"


@pytest.mark.parametrize(("slowness", "most"), [(0.05, 0.15), (0.5, 1.0)])
def test_prompts_wait_for_host_memory_where_that_is_quicker(slowness: float, most: float) -> None:
    """Two of eight find room at once. Computing the others would take ten times as long."""
    times = {}
    for policy in ("always", "auto"):
        engine = SimulatedEngine(policy, slowness * COMPUTE_BLOCK_S, slots=300)
        for number in range(PROMPTS):
            engine.store(Prompt.of(number, 4000))
        times[policy] = mean_s(engine, 4000, 8)
    assert times["auto"] <= most * times["always"]


@pytest.mark.parametrize("slowness", [20.0, HANGS])
@pytest.mark.parametrize("clients", CLIENTS)
def test_a_tier_that_becomes_slow_is_noticed(slowness: float, clients: int) -> None:
    engine = engine_with("auto", 0.01, (4000,))
    for turn in range(3):
        assert mean(ask(engine, 4000, clients, turn)) < 0.1
    alone = mean(ask(engine_with("recompute", 1.0, (4000,)), 4000, clients, 0))
    engine.block_s = slowness * COMPUTE_BLOCK_S
    turns = -(-NOTICED_WITHIN // clients)
    for turn in range(turns):
        ask(engine, 4000, clients, turn)
    assert mean(ask(engine, 4000, clients, turns)) < WORSE_MAX * alone


@pytest.mark.parametrize("clients", CLIENTS)
def test_a_tier_that_hangs_from_the_start_costs_computing_once_more_at_most(clients: int) -> None:
    """Nothing is known of it yet, and a request waits for up to 10 s without that."""
    engine = engine_with("auto", HANGS, (4000,))
    alone = mean(ask(engine_with("recompute", 1.0, (4000,)), 4000, clients, 0))
    turns = [mean(ask(engine, 4000, clients, turn)) for turn in range(5)]
    assert turns[0] < 2 * WORSE_MAX * alone
    assert max(turns[1:]) < WORSE_MAX * alone


@pytest.mark.parametrize(("before", "after"), [(1, 1), (8, 8), (8, 1)])
@pytest.mark.parametrize("slowness", [5.0, 20.0])
def test_a_tier_that_becomes_fast_again_is_noticed(
    slowness: float, before: int, after: int
) -> None:
    """``before``, ``after``: clients. A few fast blocks say little beside many slow ones."""
    engine = engine_with("auto", slowness, (4000,))
    for turn in range(4):
        ask(engine, 4000, before, turn)
    engine.block_s = 0.01 * COMPUTE_BLOCK_S
    turns = -(-NOTICED_WITHIN // after)
    for turn in range(turns):
        ask(engine, 4000, after, turn)
    assert mean(ask(engine, 4000, after, turns)) < 0.1
