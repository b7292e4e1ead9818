"""Probes that are cut into calls: how many at once, whose turn it is, and what is answered."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given, strategies

from kvtier.core import wire
from kvtier.plugin_api.backend import BackendTraits
from kvtier.tier import driver_messages as d
from kvtier.tier.probes import ProbeQueue, RunningProbe
from tests.unit.tier.test_secondary_tier import (
    ABSENT,
    DAMAGED,
    DONE,
    FAILED,
    Bench,
    keys,
    sizes,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtier.plugin_api.backend import Outcome
    from kvtier.tier.probes import ProbeSlice

LONG, SHORT = 1, 2


def bench_of(calls: int = 2, keys_min: int = 1, keys_max: int = 4, **traits: object) -> Bench:
    """Return a tier whose backend takes so many calls at once, each for so many keys."""
    limits = {"probe_batch_blocks_min": keys_min, "probe_batch_blocks_max": keys_max}
    return Bench(batches_max=calls, **{**limits, **traits})


def ask(bench: Bench, probe: int, count: int) -> None:
    bench.send(wire.Probe(probe=probe, keys=keys(count, f"{probe}:")))


def answer(bench: Bench, outcomes: Sequence[Outcome] | Outcome = DONE, batch: int = 0) -> None:
    """End one of the calls under way."""
    chosen = bench.tier.batches[batch]
    each = outcomes if isinstance(outcomes, list) else [outcomes] * len(chosen.keys)
    bench.tier.answer(chosen, each)
    bench.run()


def asked(bench: Bench) -> list[str]:
    """Return whose keys the calls under way look up."""
    return [batch.keys[0].decode()[0] for batch in bench.tier.batches]


def answers(bench: Bench) -> dict[int, tuple[bool, ...]]:
    return {each.probe: each.present for each in bench.said() if isinstance(each, wire.ProbeAnswer)}


def test_a_long_probe_is_spread_over_all_calls_that_may_run() -> None:
    """8,000 keys of half a millisecond each took four seconds in one call."""
    bench = bench_of(calls=4, keys_max=16)
    ask(bench, LONG, 400)
    assert sizes(bench.tier.batches) == [16] * 4
    answer(bench)
    assert sizes(bench.tier.batches) == [16] * 4, "and goes on as soon as one has ended"


def test_a_probe_is_not_cut_finer_than_pays() -> None:
    bench = bench_of(calls=4, keys_min=8, keys_max=16)
    ask(bench, LONG, 7)
    assert sizes(bench.tier.batches) == [7]
    answer(bench)
    ask(bench, LONG, 20)
    assert sizes(bench.tier.batches) == [10, 10]


def test_a_short_probe_behind_a_long_one_waits_for_one_round_of_calls() -> None:
    bench = bench_of()
    ask(bench, LONG, 100)
    ask(bench, SHORT, 3)
    assert asked(bench) == ["1", "1"]
    answer(bench)
    answer(bench)
    assert asked(bench) == ["1", "2"]
    answer(bench, ABSENT, batch=1)
    assert answers(bench) == {SHORT: (False, False, False)}


def test_probes_take_turns_however_long_they_are() -> None:
    bench = bench_of(calls=1)
    ask(bench, LONG, 100)
    ask(bench, SHORT, 8)
    ask(bench, 3, 100)
    turns = []
    for _ in range(7):
        turns += asked(bench)
        answer(bench)
    assert turns == ["1", "1", "2", "3", "1", "2", "3"]


def test_a_probe_has_one_answer_in_the_order_of_its_keys() -> None:
    bench = bench_of(calls=3)
    ask(bench, LONG, 8)
    assert sizes(bench.tier.batches) == [3, 3, 2]
    answer(bench, [ABSENT, DONE], batch=2)
    answer(bench, [DONE, ABSENT, ABSENT], batch=1)
    assert answers(bench) == {}
    answer(bench, DONE)
    assert answers(bench) == {LONG: (True, True, True, True, False, False, False, True)}
    assert bench.tier.actor.is_idle()


@pytest.mark.parametrize("outcomes", [FAILED, [DONE]], ids=["raised", "answered too little"])
def test_a_call_that_fails_takes_nothing_from_the_others(
    outcomes: Sequence[Outcome] | Outcome,
) -> None:
    bench = bench_of(calls=3)
    ask(bench, LONG, 6)
    assert sizes(bench.tier.batches) == [2, 2, 2]
    answer(bench, outcomes, batch=1)
    answer(bench)
    answer(bench)
    assert answers(bench) == {LONG: (True, True, False, False, True, True)}


def test_a_call_that_hangs_holds_up_its_own_probe_only() -> None:
    bench = bench_of(calls=2)
    ask(bench, LONG, 8)
    ask(bench, SHORT, 1)
    hung = bench.tier.batches[0]
    while len(bench.tier.batches) > 1:
        answer(bench, batch=1)
    assert bench.tier.batches == [hung]
    assert answers(bench) == {SHORT: (True,)}
    assert not bench.tier.actor.is_idle()
    ask(bench, 3, 8)
    while len(bench.tier.batches) > 1:
        answer(bench, batch=1)
    assert answers(bench) == {3: (True,) * 8}
    answer(bench)
    assert answers(bench) == {LONG: (True,) * 8}


def test_a_call_that_ends_twice_ends_once() -> None:
    bench = bench_of(calls=1)
    ask(bench, LONG, 8)
    (first,) = bench.tier.batches
    for _ in range(2):
        bench.tier.answer(first, [DONE] * 4)
    bench.run()
    assert sizes(bench.tier.batches) == [4]
    answer(bench)
    assert answers(bench) == {LONG: (True,) * 8}


@pytest.mark.parametrize("outcome", [ABSENT, DAMAGED])
def test_what_a_load_finds_gone_between_two_calls_of_a_probe_is_not_there(outcome: Outcome) -> None:
    """The first call has found it: the answer would say so after the tier has said it is gone."""
    bench = bench_of(calls=1)
    ask(bench, LONG, 8)
    answer(bench)
    bench.load(keys(8, "1:")[2])
    answer(bench, outcome, batch=1)
    answer(bench)
    assert answers(bench) == {LONG: (True, True, False, *[True] * 5)}


def test_what_was_gone_before_a_probe_came_to_it_may_be_there_again() -> None:
    """Since then it may have been stored, and the backend is asked only now."""
    bench = bench_of(calls=1)
    ask(bench, LONG, 8)
    bench.send(d.ContentsLost(keys=(keys(8, "1:")[7],)))
    answer(bench)
    answer(bench)
    assert answers(bench) == {LONG: (True,) * 8}


def test_a_tier_that_goes_by_request_is_asked_for_a_probe_in_one_call() -> None:
    """It may have to ask another engine for all of them together, and that may take its time."""
    bench = bench_of(calls=1, request_scoped=True)
    ask(bench, LONG, 100)
    ask(bench, SHORT, 3)
    assert sizes(bench.tier.batches) == [100, 3]


def test_a_backend_may_want_fewer_probes_than_loads_at_once() -> None:
    bench = bench_of(calls=8, probe_batches_max=2)
    ask(bench, LONG, 100)
    assert sizes(bench.tier.batches) == [4, 4]


def test_a_bounded_tier_that_does_not_know_all_it_has_answers_once_as_well() -> None:
    bench = bench_of(calls=2, capacity=8)
    bench.tier.on_announce_contents = lambda _message: None  # for now
    ask(bench, LONG, 8)
    assert sizes(bench.tier.batches) == [4, 4]
    bench.tier.mailbox.post(d.ContentsFound(keys(8, "1:")[4:6], again=False))
    answer(bench, batch=1)
    assert answers(bench) == {}
    answer(bench)
    assert answers(bench) == {LONG: (False,) * 4 + (True,) * 2 + (False,) * 2}


def test_probes_do_not_wait_for_loads_and_stores() -> None:
    bench = bench_of(calls=1)
    bench.load(*keys(40, "l"))
    bench.store(*keys(40, "s"))
    ask(bench, SHORT, 1)
    assert [type(batch) for batch in bench.tier.batches] == [
        d.LoadBatch,
        d.StoreBatch,
        d.ProbeBatch,
    ]


@given(
    probes=strategies.lists(strategies.integers(1, 60), min_size=1, max_size=8),
    calls=strategies.integers(1, 9),
    limits=strategies.tuples(strategies.integers(1, 20), strategies.integers(1, 20)).map(sorted),
    data=strategies.data(),
)
def test_every_key_of_every_probe_is_looked_up_once_and_in_order(
    probes: list[int], calls: int, limits: list[int], data: strategies.DataObject
) -> None:
    keys_min, keys_max = limits
    queue = ProbeQueue(
        BackendTraits(calls, 1, probe_batch_blocks_min=keys_min, probe_batch_blocks_max=keys_max)
    )
    waiting = [
        RunningProbe(wire.Probe(number, keys(count, f"{number}:")))
        for number, count in enumerate(probes)
    ]
    looked_up: dict[int, list[bytes]] = {probe.id: [] for probe in waiting}
    running: list[ProbeSlice] = []

    def start() -> None:
        while (batch := queue.start_batch()) is not None:
            running.append(batch)
            assert len(running) <= calls
            assert len(batch.keys) <= keys_max
            assert batch.probe.keys[batch.start :][: len(batch.keys)] == batch.keys
            looked_up[batch.probe.id] += batch.keys

    for probe in waiting:
        queue.add(probe)
        start()
        if running and data.draw(strategies.booleans()):
            queue.end_batch(running.pop(0))
            start()
    while running:
        queue.end_batch(running.pop(0))
        start()
    assert not queue
    assert looked_up == {probe.id: list(probe.keys) for probe in waiting}
