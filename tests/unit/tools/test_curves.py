"""What policy-only replay promises: the runtime's calls, an obvious cache's hits, an optimum."""

from __future__ import annotations

from functools import cache
from itertools import combinations, count
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings, strategies

from kvtier.errors import ConfigError, InternalError
from kvtier.plugin_api.keys import GROUP_BYTES
from kvtier.policies.eviction.lru import LRUPolicy
from kvtier.tools.replay import curves
from kvtier.tools.replay.curves import (
    MIN,
    Workload,
    installed_policies,
    parse_capacities,
    parse_policies,
    replay,
)
from kvtier.tools.replay.traces import Trace, TraceRequest
from tests.support.examples import examples

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from kvtier.plugin_api.keys import Key, RequestId


def trace_of(*requests: Sequence[int]) -> Trace:
    return Trace(
        path=Path("trace"),
        format="plain",
        block_tokens=16,
        requests=tuple(
            TraceRequest(float(second), 16 * len(blocks), 1, tuple(blocks))
            for second, blocks in enumerate(requests)
        ),
    )


@strategies.composite
def traces(draw: strategies.DrawFn, requests_max: int = 30, blocks_max: int = 40) -> Trace:
    """Requests that grow from prefixes of earlier ones, as prompts do."""
    known: list[tuple[int, ...]] = [()]
    blocks = 0
    for _ in range(draw(strategies.integers(1, requests_max))):
        stem = draw(strategies.sampled_from(known))
        stem = stem[: draw(strategies.integers(0, len(stem)))]
        grown = min(draw(strategies.integers(0, 4)), blocks_max - blocks)
        known.append((*stem, *range(blocks, blocks + grown)))
        blocks += grown
    requests = [each for each in known[1:] if each]
    return trace_of(*(requests or [(0,)]))


def obvious_lru(trace: Trace, capacity: int) -> int:
    """A list, oldest first. The last request's blocks are at its end, tails before heads."""
    resident: list[int] = []
    hits = 0
    for request in trace.requests:
        run = 0
        while run < len(request.blocks) and request.blocks[run] in resident:
            run += 1
        hits += run
        head = request.blocks[:capacity]
        resident = [block for block in resident if block not in request.blocks] + [
            block for block in reversed(request.blocks) if block in resident or block in head
        ]
        resident = resident[len(resident) - min(capacity, len(resident)) :]
    return hits


@given(trace=traces(), capacity=strategies.integers(1, 45))
def test_lru_hits_what_an_obvious_list_hits(trace: Trace, capacity: int) -> None:
    assert replay(Workload(trace), "lru", capacity).hits == obvious_lru(trace, capacity)


def best_possible(trace: Trace, capacity: int) -> int:
    """Try every choice of what to keep after each request."""
    requests = [request.blocks for request in trace.requests]

    @cache
    def best(number: int, resident: frozenset[int]) -> int:
        if number == len(requests):
            return 0
        run = 0
        while run < len(requests[number]) and requests[number][run] in resident:
            run += 1
        there = sorted(resident | set(requests[number]))
        choices = combinations(there, min(capacity, len(there)))
        return run + max(best(number + 1, frozenset(kept)) for kept in choices)

    return best(0, frozenset())


@given(trace=traces(requests_max=6, blocks_max=7), capacity=strategies.integers(1, 4))
@settings(max_examples=examples(60))
def test_min_is_the_best_that_any_choice_of_victims_can_do(trace: Trace, capacity: int) -> None:
    assert replay(Workload(trace), MIN, capacity).hits == best_possible(trace, capacity)


@given(trace=traces(), capacity=strategies.integers(1, 45))
@settings(max_examples=examples(15))
def test_no_installed_policy_beats_min(trace: Trace, capacity: int) -> None:
    workload = Workload(trace)
    bound = replay(workload, MIN, capacity).hits
    for policy in installed_policies():
        assert replay(workload, policy, capacity).hits <= bound


@given(trace=traces())
@settings(max_examples=examples(15))
def test_every_policy_is_an_endless_cache_where_all_fits(trace: Trace) -> None:
    workload = Workload(trace)
    for policy in [*installed_policies(), MIN]:
        point = replay(workload, policy, workload.distinct_blocks)
        assert point.hit_ratio == pytest.approx(workload.endless_hit_ratio())


def test_a_request_larger_than_the_cache_keeps_its_head() -> None:
    long = tuple(range(10))
    for policy in installed_policies():
        assert replay(Workload(trace_of(long, long)), policy, 4).hits == 4


class Recorder(LRUPolicy):
    """Notes how it is called."""

    calls: list[tuple[object, ...]]

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        Recorder.calls = []

    def admit(self, keys: Sequence[Key], request: RequestId, *, held: bool) -> None:
        self.calls.append(("admit", numbers(keys), request, held))
        super().admit(keys, request, held=held)

    def touch(self, keys: Sequence[Key], request: RequestId) -> None:
        self.calls.append(("touch", numbers(keys), request))
        super().touch(keys, request)

    def unhold(self, keys: Sequence[Key]) -> None:
        self.calls.append(("unhold", numbers(keys)))
        super().unhold(keys)

    def end_request(self, request: RequestId, order: Sequence[Key] | None) -> None:
        self.calls.append(("end", request, numbers(order or ())))
        super().end_request(request, order)

    def choose_victims(self, count: int, exclude: Collection[Key]) -> list[Key]:
        self.calls.append(("choose", count, sorted(numbers(exclude))))
        return super().choose_victims(count, exclude)

    def pass_time(self, now: float) -> None:
        self.calls.append(("time", now))


def numbers(keys: Collection[Key]) -> list[int]:
    return [int.from_bytes(key[:-GROUP_BYTES]) for key in keys]


def test_a_policy_is_called_as_the_primary_tier_calls_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curves, "make_policy", lambda _, capacity: Recorder(capacity))
    assert replay(Workload(trace_of((0, 1, 2), (0, 3), (0, 4))), "recorder", 3).hits == 2
    assert Recorder.calls == [
        ("time", 0.0),
        ("admit", [0, 1, 2], "0", True),
        ("unhold", [0, 1, 2]),
        ("end", "0", [0, 1, 2]),
        ("time", 1.0),
        ("touch", [0], "1"),
        ("choose", 1, [0, 3]),
        ("admit", [3], "1", True),
        ("unhold", [3]),
        ("end", "1", [0, 3]),
        ("time", 2.0),
        ("touch", [0], "2"),
        ("choose", 1, [0, 4]),
        ("admit", [4], "2", True),
        ("unhold", [4]),
        ("end", "2", [0, 4]),
    ]


def test_time_passes_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curves, "make_policy", lambda _, capacity: Recorder(capacity))
    trace = trace_of((0,), (1,), (2,), (3,))
    times = [0.2, 0.9, 1.0, 7.5]
    requests = [r._replace(time_s=t) for r, t in zip(trace.requests, times, strict=True)]
    replay(Workload(Trace(trace.path, "plain", 16, tuple(requests))), "recorder", 9)
    told = [call[1] for call in Recorder.calls if call[0] == "time"]
    assert told == [0.0, 1.0, 7.0]


class Liar(LRUPolicy):
    def choose_victims(self, count: int, exclude: Collection[Key]) -> list[Key]:
        return list(exclude)[:count]


def test_a_policy_that_chooses_excluded_blocks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curves, "make_policy", lambda _, capacity: Liar(capacity))
    with pytest.raises(InternalError, match="eviction policy liar chose"):
        replay(Workload(trace_of((0, 1), (2,))), "liar", 2)


def test_progress_adds_up_to_all_requests() -> None:
    workload = Workload(trace_of(*((n,) for n in range(123))))
    for policy in ("lru", MIN):
        told = count()
        replay(workload, policy, 5, told.__next__)
        assert next(told) == 123


def test_a_trace_without_blocks_is_refused() -> None:
    with pytest.raises(ConfigError, match="nothing to replay"):
        Workload(trace_of(()))


def test_capacities_are_blocks_or_shares() -> None:
    assert parse_capacities("50%, 7,0.5 %,7", 1000) == [5, 7, 500]
    assert parse_capacities("0.5%,1%,2%", 20) == [1]


@pytest.mark.parametrize(
    "text",
    ["", "0", "-1", "1.5", "0%", "5%%", "many", "1e3", "9" * 20, ",".join(map(str, range(1, 102)))],
)
def test_wrong_capacities_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"capacities=|more than 100"):
        parse_capacities(text, 1000)


def test_policies_are_named_or_all() -> None:
    assert parse_policies("all") == installed_policies()
    assert {"lru", "arc"} <= set(installed_policies())
    assert parse_policies("lru, arc,lru") == ["lru", "arc"]
    with pytest.raises(ConfigError, match="'fifi' is not installed"):
        parse_policies("lru,fifi")
    with pytest.raises(ConfigError, match="names none"):
        parse_policies(",")
