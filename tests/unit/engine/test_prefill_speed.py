"""How fast the engine computes prompts, learnt from its steps."""

from __future__ import annotations

import random
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.engine.decide.prefill_speed import LAG_MAX, PrefillSpeed

CONSTANT, LINEAR, QUADRATIC = 0.004, 5e-5, 4e-9


class Engine:
    """An engine whose steps take what the model says, seen ``lag`` intervals later."""

    def __init__(self, lag: int = 0, factor: float = 1.0, noise: float = 0.0) -> None:
        self.speed = PrefillSpeed()
        self.factor = factor
        self._noise = noise
        self._running = deque([0.0] * lag)
        self._random = random.Random(1)

    def step(self, tokens: int, attention: int) -> None:
        took = (CONSTANT + LINEAR * tokens + QUADRATIC * attention) * self.factor
        took *= 1 + self._noise * self._random.uniform(-1, 1)
        self._running.append(took)
        self.speed.step(tokens, attention, self._running.popleft() or CONSTANT)

    def prompts(self, count: int, budget: int = 512) -> None:
        """Compute prompts of different lengths, each followed by steps that decode."""
        for number in range(count):
            length, computed = 700 + 900 * (number % 5), 0
            while computed < length:
                tokens = min(budget, length - computed)
                end = computed + tokens
                self.step(tokens, end * end - computed * computed)
                computed = end
            for _ in range(3):
                self.step(0, 0)


def truth(first: int, end: int, budget: int = 512) -> float:
    steps = (end - first) / budget
    return CONSTANT * steps + LINEAR * (end - first) + QUADRATIC * (end**2 - first**2)


def seconds(speed: PrefillSpeed, first: int, end: int) -> float:
    assert speed.rates is not None
    return speed.rates.seconds(first, end)


def test_nothing_is_known_at_first() -> None:
    assert PrefillSpeed().rates is None


def test_what_is_configured_counts_and_nothing_is_learnt() -> None:
    speed = PrefillSpeed(2000.0)
    for _ in range(20):
        speed.step(512, 512**2, 100.0)
    assert seconds(speed, 0, 1000) == pytest.approx(0.5)


@pytest.mark.parametrize("lag", range(LAG_MAX + 1))
@pytest.mark.parametrize(("noise", "budget"), [(0.0, 512), (0.1, 512), (0.1, 8192)])
def test_the_lag_of_an_engine_is_found_out(lag: int, noise: float, budget: int) -> None:
    """Also where prompts take one step each: the other reading is far off, but predicts as well."""
    engine = Engine(lag, noise=noise)
    engine.prompts(12, budget)
    assert engine.speed.lag == lag
    for first, end in ((0, 500), (0, 4000), (3000, 4000)):
        took = truth(first, end, min(budget, end - first))
        assert seconds(engine.speed, first, end) == pytest.approx(took, rel=0.3)


def test_a_pause_after_a_prompt_is_not_taken_for_its_time() -> None:
    engine = Engine()
    engine.prompts(10)
    engine.speed.step(512, 512**2, CONSTANT + LINEAR * 512)
    engine.speed.step(0, 0, 60.0)
    assert seconds(engine.speed, 0, 3000) == pytest.approx(truth(0, 3000), rel=0.1)


def test_a_slower_engine_is_noticed() -> None:
    engine = Engine()
    engine.prompts(10)
    engine.factor = 5.0
    engine.prompts(5)
    assert seconds(engine.speed, 0, 3000) == pytest.approx(5 * truth(0, 3000), rel=0.5)


def test_time_that_says_nothing_is_left_out() -> None:
    """While the engine had nothing to compute."""
    engine = Engine(lag=1)
    engine.prompts(10)
    before = seconds(engine.speed, 0, 3000)
    for _ in range(50):
        engine.speed.step(512, 512**2, None)
    assert seconds(engine.speed, 0, 3000) == pytest.approx(before, rel=0.05)


@given(
    steps=st.lists(
        st.tuples(
            st.integers(0, 8192), st.integers(0, 10**9), st.one_of(st.none(), st.floats(0, 1e3))
        ),
        max_size=30,
    )
)
def test_no_part_is_ever_negative(steps: list[tuple[int, int, float | None]]) -> None:
    speed = PrefillSpeed()
    for step in steps:
        speed.step(*step)
        assert speed.rates is None or min(speed.rates) >= 0


def test_many_short_prompts_do_not_make_long_ones_seem_free() -> None:
    """What a step of few tokens takes is mostly the constant, which tells nothing of many."""
    engine = Engine()
    engine.prompts(10)
    for _ in range(30):
        engine.step(16, 16 * 16)
    assert seconds(engine.speed, 0, 4000) == pytest.approx(truth(0, 4000), rel=0.1)


def test_after_short_prompts_alone_a_long_one_seems_no_quicker_than_it_is() -> None:
    engine = Engine()
    engine.prompts(10)
    for _ in range(1000):
        engine.step(16, 16 * 16)
    assert seconds(engine.speed, 0, 4000) >= truth(0, 4000)


def test_an_engine_with_nothing_to_compute_seems_as_fast_as_before() -> None:
    engine = Engine()
    engine.prompts(10)
    before = engine.speed.rates
    for _ in range(1000):
        engine.step(0, 0)
    assert engine.speed.rates == before


def test_while_both_readings_are_alike_the_plain_one_counts() -> None:
    """All prompts alike, and nothing but them: nobody can tell which interval was whose."""
    engine = Engine()
    for _ in range(10):
        for tokens, attention in ((512, 512 * 512), (512, 1024 * 1024 - 512 * 512), (0, 0)):
            engine.step(tokens, attention)
    assert engine.speed.lag == 0
