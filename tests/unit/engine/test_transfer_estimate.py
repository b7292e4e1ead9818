"""What a tier's loads are expected to take, from those that ended."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.engine.decide.cost_fit import CostFit
from kvtier.engine.decide.transfer_estimate import TransferEstimate

SIZES = (64, 128, 192, 64, 256, 32)


def learnt(
    latency_s: float,
    block_s: float,
    *,
    count: int = 12,
    estimate: TransferEstimate | None = None,
    start: float = 0.0,
) -> TransferEstimate:
    """Return an estimate that has seen jobs of a tier that is always the same."""
    estimate = estimate or TransferEstimate()
    for number in range(count):
        blocks = SIZES[number % len(SIZES)]
        estimate.observe(blocks, latency_s + block_s * blocks, start + number)
    return estimate


def seconds(estimate: TransferEstimate, blocks: int) -> float:
    found = estimate.seconds(blocks)
    assert found is not None
    return found


def test_nothing_is_known_at_first() -> None:
    assert TransferEstimate().seconds(1) is None
    assert TransferEstimate().cost(0) is None


@pytest.mark.parametrize(("latency_s", "block_s"), [(0.01, 0.001), (0.0, 0.002), (0.05, 0.0)])
def test_latency_and_throughput_are_told_apart(latency_s: float, block_s: float) -> None:
    estimate = learnt(latency_s, block_s)
    for blocks in (1, 64, 1000):
        truth = latency_s + block_s * blocks
        assert seconds(estimate, blocks) == pytest.approx(truth, rel=1e-3, abs=1e-5)


def test_while_all_loads_are_as_long_all_is_throughput() -> None:
    """A longer one is expected to take longer, rather than to cost nothing more."""
    estimate = TransferEstimate()
    for number in range(5):
        estimate.observe(64, 0.5, number)
    assert seconds(estimate, 128) == pytest.approx(1.0)


@given(
    before=st.floats(1e-5, 1.0),
    factor=st.sampled_from([0.01, 0.1, 0.4, 3.0, 10.0, 100.0]),
    latency_s=st.floats(0.0, 0.1),
)
def test_a_step_is_followed_within_ten_observations(
    before: float, factor: float, latency_s: float
) -> None:
    """From fast to slow, and back."""
    estimate = learnt(latency_s * before, before)
    learnt(latency_s * before * factor, before * factor, count=10, estimate=estimate, start=12.0)
    truth = (latency_s + 100) * before * factor
    assert truth / 2 <= seconds(estimate, 100) <= truth * 2


@given(outlier=st.one_of(st.floats(1e-6, 1e-3), st.floats(10.0, 1e6)))
def test_a_single_outlier_moves_it_little(outlier: float) -> None:
    estimate = learnt(0.01, 0.001)
    before = seconds(estimate, 100)
    estimate.observe(100, outlier, 12.0)
    assert before / 2 <= seconds(estimate, 100) <= before * 2


@given(
    jobs=st.lists(
        st.tuples(st.integers(1, 100_000), st.floats(0.0, 1e4), st.booleans()), max_size=40
    )
)
def test_it_is_never_negative(jobs: list[tuple[int, float, bool]]) -> None:
    estimate = TransferEstimate()
    for number, (blocks, took_s, ends) in enumerate(jobs):
        (estimate.observe if ends else estimate.given_up)(blocks, took_s, float(number))
        assert estimate.latency_s >= 0
        assert estimate.block_s >= 0
        assert seconds(estimate, 1) > 0
        assert 0 < estimate.spread <= 2


def test_a_load_that_was_given_up_counts_at_once() -> None:
    estimate = learnt(0.0, 0.001)
    estimate.given_up(100, 3.0, 12.0)
    assert seconds(estimate, 100) >= 3.0


def test_a_load_given_up_early_does_not_make_a_slow_tier_fast() -> None:
    estimate = learnt(0.0, 1.0)
    estimate.given_up(100, 0.5, 12.0)
    assert seconds(estimate, 100) == pytest.approx(100.0, rel=1e-3)


def test_after_a_long_silence_one_observation_is_enough() -> None:
    """As when a tier that was declined is tried again."""
    estimate = learnt(0.0, 1.0)
    estimate.observe(16, 0.016, 200.0)
    assert seconds(estimate, 100) == pytest.approx(0.1)


def test_an_outlier_after_a_fresh_start_is_not_taken_for_a_change() -> None:
    """What was seen before the start, of which nothing else is left, must not count with it."""
    fit = CostFit(0.9)
    for seconds in (1.0, 1.0, 1.0, 5.0, 5.0):
        fit.observe(1, 10, seconds)
    fit.restart()
    fit.observe(1, 10, 1.0)
    fit.observe(1, 10, 5.0)
    assert fit.seconds(1, 10) < 3.0


def test_the_spread_is_how_far_off_it_was() -> None:
    steady, shaky = learnt(0.0, 0.001, count=40), learnt(0.0, 0.001, count=1)
    for number in range(40):
        shaky.observe(100, 0.1 * (1.6 if number % 2 else 0.7), number)
    assert steady.spread < 0.2 < shaky.spread
