from __future__ import annotations

import gc
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, settings, strategies

from kvtier.plugin_api.runs import Runs
from kvtier.policies.eviction.lru import LRUPolicy
from tests.support.examples import examples

KEYS = [bytes([code]) for code in b"abcdefgh"]
REQUESTS = ["r1", "r2", "r3"]


@dataclass
class Run:
    """Who has it (nobody, once the request is over), and its keys from head to tail.

    ``aside``: met while held. They stand behind the tail, the last one to come is the last.
    """

    request: str | None
    keys: list[bytes]
    aside: list[bytes] = field(default_factory=list)


class SlowLRU:
    """The same in the most obvious way: a list of runs, the oldest first."""

    def __init__(self) -> None:
        self.runs: list[Run] = []
        self.held: set[bytes] = set()

    def resident(self) -> set[bytes]:
        return {key for run in self.runs for key in run.keys + run.aside}

    def remove(self, keys: list[bytes]) -> None:
        for run in self.runs:
            run.keys = [key for key in run.keys if key not in keys]
            run.aside = [key for key in run.aside if key not in keys]
        self.runs = [run for run in self.runs if run.keys or run.aside]

    def newest(self, request: str) -> Run:
        """Return the request's run, made the newest and whole again."""
        mine = [run for run in self.runs if run.request == request] or [Run(request, [])]
        self.runs = [run for run in self.runs if run is not mine[0]] + mine
        mine[0].keys += mine[0].aside
        mine[0].aside = []
        return mine[0]

    def admit(self, keys: list[bytes], request: str, *, held: bool) -> None:
        run = self.newest(request)
        new = [key for key in keys if key not in run.keys]
        mine = run.keys + new
        self.remove(new)
        run.keys = mine
        self.runs = [each for each in self.runs if each is not run] + ([run] if mine else [])
        if held:
            self.held |= set(keys)

    def touch(self, keys: list[bytes], request: str) -> None:
        self.admit([key for key in keys if key in self.resident()], request, held=False)

    def hold(self, keys: list[bytes]) -> None:
        self.held |= set(keys)

    def unhold(self, keys: list[bytes]) -> None:
        self.held -= set(keys)
        for key in keys:
            for run in self.runs:
                if key in run.aside:
                    run.aside.remove(key)
                    run.keys.append(key)

    def forget(self, keys: list[bytes]) -> None:
        self.remove(keys)
        self.held -= set(keys)

    def end_request(self, request: str, order: list[bytes] | None) -> None:
        if order is not None:
            used = [key for key in order if key in self.resident()]
            last = list(dict.fromkeys(reversed(used)))[::-1]
            self.admit(last, request, held=False)
            run = self.newest(request)
            run.keys = [key for key in run.keys if key not in last] + last
        run = self.newest(request)
        run.request = None
        self.remove([])

    def choose_victims(self, count: int, exclude: set[bytes]) -> list[bytes]:
        victims: list[bytes] = []
        for run in self.runs:
            for key in reversed(run.keys):
                if len(victims) >= count:
                    break
                if key in self.held:
                    run.keys = [each for each in run.keys if each != key]
                    run.aside = [key, *run.aside]
                elif key not in exclude:
                    victims.append(key)
        self.remove(victims)
        return victims

    def restore(self, keys: list[bytes]) -> None:
        back = [key for key in reversed(keys) if key not in self.resident()]
        self.runs = [Run(None, back), *self.runs] if back else self.runs

    def clear(self) -> None:
        self.runs = []
        self.held = set()


keys = strategies.lists(strategies.sampled_from(KEYS), min_size=1, max_size=4, unique=True)
orders = strategies.none() | strategies.lists(strategies.sampled_from(KEYS), max_size=6)
requests = strategies.sampled_from(REQUESTS)
calls = strategies.one_of(
    strategies.tuples(strategies.just("admit"), keys, requests, strategies.booleans()),
    strategies.tuples(strategies.just("touch"), keys, requests),
    strategies.tuples(strategies.sampled_from(["hold", "unhold", "unhold", "forget"]), keys),
    strategies.tuples(strategies.just("end_request"), requests, orders),
    strategies.tuples(
        strategies.just("choose_victims"),
        strategies.integers(0, 4),
        strategies.sets(strategies.sampled_from(KEYS)),
    ),
    strategies.tuples(
        strategies.just("choose_victims"), strategies.integers(1, 4), strategies.just(set())
    ),
    strategies.tuples(strategies.just("restore"), strategies.integers(0, 2)),
    strategies.tuples(strategies.just("clear")),
)


@settings(max_examples=examples(150))
@given(strategies.lists(calls, max_size=40))
def test_it_agrees_with_a_slow_obvious_model(history: list[tuple[Any, ...]]) -> None:
    policy, model = LRUPolicy(8), SlowLRU()
    chosen: list[bytes] = []
    for name, *arguments in history:
        if name == "admit":
            admitted, request, held = arguments
            policy.admit(admitted, request, held=held)
            model.admit(admitted, request, held=held)
        elif name == "restore":
            policy.restore(chosen[arguments[0] :])
            model.restore(chosen[arguments[0] :])
            chosen = []
        else:
            said = getattr(policy, name)(*arguments)
            assert said == getattr(model, name)(*arguments)
            chosen = said or chosen
        assert len(policy) == len(model.resident())
        expect_orderly(policy._runs)


def expect_orderly(runs: Runs) -> None:
    """What ``Runs`` keeps beside the keys themselves fits them, and nothing is left over."""
    at = runs._at.values()
    everywhere = [(key, run) for run in at for key in [*run.keys, *(run.aside or ())]]
    assert dict(everywhere) == runs.run_of
    assert len(everywhere) == len(runs)
    assert all(run.keys or run.aside for run in at)
    assert runs._at == {run.stamp: run for run in at}
    assert runs._open == {run.request: run for run in at if run.request is not None}
    assert runs._aside_count == sum(len(run.aside or ()) for run in at)
    assert all(run.stamp in runs._is_early for run in at if run.keys and run.stamp < runs._front)
    assert sorted(runs._early) == sorted(runs._is_early)


def test_what_was_held_in_the_way_is_the_next_of_its_run_to_go() -> None:
    policy = LRUPolicy(6)
    policy.admit(KEYS[:4], "old", held=False)
    policy.admit(KEYS[4:6], "new", held=False)
    policy.hold([KEYS[2], KEYS[3]])
    assert policy.choose_victims(1, set()) == [KEYS[1]]
    policy.unhold([KEYS[3]])
    assert policy.choose_victims(2, set()) == [KEYS[3], KEYS[0]]
    assert policy.choose_victims(1, set()) == [KEYS[5]]
    policy.unhold([KEYS[2]])
    assert policy.choose_victims(2, set()) == [KEYS[2], KEYS[4]]


def test_what_was_held_in_the_way_stays_behind_when_another_request_uses_the_rest() -> None:
    policy = LRUPolicy(6)
    policy.admit(KEYS[:3], "old", held=False)
    policy.admit(KEYS[3:4], "new", held=False)
    policy.hold([KEYS[2]])
    assert policy.choose_victims(1, set()) == [KEYS[1]]
    policy.touch(KEYS[:1], "newer")
    policy.unhold([KEYS[2]])
    assert policy.choose_victims(3, set()) == [KEYS[2], KEYS[3], KEYS[0]]


def test_held_keys_are_looked_at_once_however_often_victims_are_chosen() -> None:
    """A tier that hangs may hold half of the blocks, and each store asks for victims."""

    class CountedSet(set[bytes]):
        asked = 0

        def __contains__(self, key: object) -> bool:
            self.asked += 1
            return super().__contains__(key)

    held = CountedSet()
    runs = Runs(held)
    stuck = [number.to_bytes(4, "big") for number in range(1000)]
    for start in range(0, len(stuck), 10):
        runs.put(stuck[start : start + 10], f"stuck {start}")
    held.update(stuck)
    for number in range(1000):
        key = (b"free", b"%d" % number)
        runs.put([b"".join(key), b"excluded"], f"r{number}")
        assert runs.pop(1, {b"excluded"}) == [b"".join(key)]
    assert held.asked < 5 * len(stuck)


def test_what_a_request_used_in_the_gpu_counts_as_used_when_it_ends() -> None:
    policy = LRUPolicy(6)
    policy.admit(KEYS[:3], "first", held=False)
    policy.end_request("first", KEYS[:3])
    policy.admit(KEYS[3:4], "second", held=False)
    policy.end_request("third", [*KEYS[:2], KEYS[7]])
    assert policy.choose_victims(4, set()) == [KEYS[2], KEYS[3], KEYS[1], KEYS[0]]


def test_a_million_keys_are_nothing_to_the_garbage_collector() -> None:
    """It walks through each object that it tracks; none of them may belong to a run."""
    policy = LRUPolicy(4000)
    for number in range(1000):
        new = [(4 * number + index).to_bytes(4, "big") for index in range(4)]
        policy.admit(new, f"r{number}", held=False)
        policy.end_request(f"r{number}", new)
        policy.hold(new)
    gc.collect()
    runs = policy._runs
    seen = [policy, policy._held, runs, *runs.__dict__.values(), *runs.run_of.values()]
    seen += [run.keys for run in runs.run_of.values()]
    tracked = [each for each in seen if gc.is_tracked(each)]
    assert sum(len(each) for each in tracked if isinstance(each, dict | set | list)) == 0
    assert len(tracked) < 10


def test_tails_go_before_heads_and_old_requests_before_new_ones() -> None:
    policy = LRUPolicy(6)
    policy.admit(KEYS[:3], "old", held=False)
    policy.admit(KEYS[3:6], "new", held=False)
    assert policy.choose_victims(4, set()) == [KEYS[2], KEYS[1], KEYS[0], KEYS[5]]


def test_a_shared_prefix_belongs_to_the_request_that_used_it_last() -> None:
    policy = LRUPolicy(6)
    policy.admit(KEYS[:3], "first", held=False)
    policy.touch(KEYS[:2], "second")
    policy.admit(KEYS[3:4], "second", held=False)
    assert policy.choose_victims(9, set()) == [KEYS[2], KEYS[3], KEYS[1], KEYS[0]]


def test_what_is_restored_is_the_next_to_go_in_the_same_order() -> None:
    policy = LRUPolicy(6)
    policy.admit(KEYS[:4], "r", held=False)
    chosen = policy.choose_victims(2, set())
    policy.restore(chosen)
    assert policy.choose_victims(3, set()) == [*chosen, KEYS[1]]


def test_what_was_admitted_again_is_not_restored() -> None:
    policy = LRUPolicy(6)
    policy.admit(KEYS[:1], "r", held=False)
    chosen = policy.choose_victims(1, set())
    policy.admit(chosen, "new", held=False)
    policy.restore(chosen)
    assert len(policy) == 1
    assert policy.choose_victims(2, set()) == chosen
    assert policy.choose_victims(2, set()) == []


def test_after_clear_nothing_is_known_or_held() -> None:
    policy = LRUPolicy(6)
    policy.admit(KEYS[:2], "r", held=True)
    policy.clear()
    assert len(policy) == 0
    policy.admit(KEYS[:1], "r", held=False)
    assert policy.choose_victims(2, set()) == KEYS[:1]
