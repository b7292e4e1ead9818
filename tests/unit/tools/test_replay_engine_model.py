"""The replay's clock and its stated engine."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies

from kvtier.errors import ConfigError
from kvtier.tools.replay.clock import SLEEP_S_MAX, STEP_S, ReplayClock
from kvtier.tools.replay.engine_model import EngineModel
from kvtier.tools.replay.traces import TraceRequest


class World:
    """Real time that passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.slept: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def clock_in(world: World, *, jumps: bool) -> ReplayClock:
    clock = ReplayClock(jumps=jumps, real=lambda: world.now, sleep=world.sleep)
    world.now += 5.0
    assert clock.now() == clock.real_s() == 0.0, "it stands while tiers reach their servers"
    clock.begin()
    return clock


def test_the_clock_jumps_to_the_next_event_while_no_tier_works() -> None:
    world = World()
    clock = clock_in(world, jumps=True)
    clock.pass_time(3600.0, tiers_work=False)
    assert clock.now() == 3600.0
    assert clock.real_s() == 0.0
    assert world.slept == []


@given(until=strategies.none() | strategies.floats(0.0, 1e6))
def test_the_clock_never_jumps_while_a_tier_works(until) -> None:
    """A tier's deadline counts real seconds."""
    world = World()
    clock = clock_in(world, jumps=True)
    clock.pass_time(until, tiers_work=True)
    assert clock.skipped_s == 0.0
    assert all(seconds <= STEP_S for seconds in world.slept)


@given(until=strategies.floats(0.0, 1e6), tiers_work=strategies.booleans())
def test_without_jumps_time_is_slept_through_a_bit_at_a_time(until, tiers_work) -> None:
    """In bits, so that Ctrl-C is heard."""
    world = World()
    clock = clock_in(world, jumps=False)
    clock.pass_time(until, tiers_work=tiers_work)
    assert clock.skipped_s == 0.0
    assert sum(world.slept) <= min(until, SLEEP_S_MAX)
    assert clock.now() == pytest.approx(clock.real_s())


def test_what_is_due_already_takes_no_time() -> None:
    world = World()
    clock = clock_in(world, jumps=True)
    clock.pass_time(5.0, tiers_work=False)
    clock.pass_time(4.0, tiers_work=False)
    assert clock.now() == 5.0
    assert world.slept == []


REQUESTS = strategies.lists(
    strategies.builds(
        TraceRequest,
        time_s=strategies.integers(0, 50).map(float),
        input_tokens=strategies.integers(0, 30),
        output_tokens=strategies.integers(0, 30),
        blocks=strategies.just(()),
        ended_s=strategies.none() | strategies.integers(0, 80).map(float),
        gpu_tokens=strategies.just(0),
    ),
    max_size=12,
).map(lambda requests: sorted(requests, key=lambda request: request.time_s))


@given(
    requests=REQUESTS,
    at_once=strategies.integers(1, 4),
    speed=strategies.sampled_from([1.0, 2.0]),
)
def test_times_without_offloading_are_those_of_an_engine_played_by_hand(
    requests, at_once, speed
) -> None:
    """One prompt is computed at a time; a request enters when there is room, in order."""
    model = EngineModel(
        prefill_tokens_per_s=2.0,
        decode_tokens_per_s=4.0,
        requests_in_flight_max=at_once,
        speed=speed,
    )
    ends: list[float] = []
    entered = computed = 0.0
    expected = []
    for request in requests:
        arrival = request.time_s / speed
        entered = max(arrival, entered)
        while sum(end > entered for end in ends) >= at_once:
            entered = min(end for end in ends if end > entered)
        computed = max(entered, computed) + max(1, request.input_tokens) / 2.0 / speed
        if request.ended_s is None:
            ends.append(computed + request.output_tokens / 4.0 / speed)
        else:
            ends.append(max(computed, request.ended_s / speed))
        expected.append(computed - arrival)
    assert model.first_tokens_without_offloading(requests) == pytest.approx(expected)


@pytest.mark.parametrize(
    "name", ["prefill_tokens_per_s", "decode_tokens_per_s", "requests_in_flight_max", "speed"]
)
@pytest.mark.parametrize("value", [0, -1, float("nan")])
def test_speeds_must_be_above_zero(name, value) -> None:
    with pytest.raises(ConfigError, match=name):
        EngineModel(**{name: value})
