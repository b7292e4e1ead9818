"""While a request runs, no head of its prefix goes before a tail that could go instead.

Policies see a shared head as another request's, and learn the order of a request's blocks
for sure when it ends. So this is not theirs to promise, and each is tried here.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings, strategies

from kvtier.core import messages as m
from kvtier.core.messages import RequestOrder
from kvtier.engine.primary.running_prefixes import RunningPrefixes
from kvtier.policies.eviction.arc import ARCPolicy
from kvtier.policies.eviction.lru import LRUPolicy
from kvtier.policies.eviction.reuse.policy import ReusePolicy
from tests.support.examples import TIMES, examples
from tests.unit.engine._story import Story

if TYPE_CHECKING:
    from collections.abc import Collection

    from kvtier.core.actor import Actor
    from kvtier.core.wire import Message
    from kvtier.plugin_api.eviction_policy import EvictionPolicy
    from kvtier.plugin_api.keys import Key

pytestmark = pytest.mark.slow

POLICIES = [LRUPolicy, ARCPolicy, ReusePolicy]
REQUESTS_MAX = 4


def block(path: str, number: int, group: int = 0) -> Key:
    """Return the key of the block that ends there: it names all tokens before it."""
    return path[: number + 1].encode().ljust(32, b"-") + group.to_bytes(4, "big")


class Engine(Story):
    """A runtime without tiers, and requests that share prefixes of their paths."""

    def __init__(self, policy: type[EvictionPolicy], slots: int, groups: int = 1) -> None:
        super().__init__(slots=slots, tiers=0, policy=policy)
        self.groups = groups
        self.slots = self.runtime.primary.slots
        self.paths: dict[str, list[Key]] = {}
        self.known: dict[str, list[Key]] = {}  # of each request: what it used, or told
        self.untold: set[str] = set()
        self.done: dict[str, int] = {}
        self.started = 0
        self._before: set[Key] = set()
        self.runtime.cell.before_delivery = self._foresee
        self.runtime.cell.after_delivery = self._observe

    def start(self, path: str, *, tells: bool) -> str:
        """Begin a request."""
        name = f"r{self.started}"
        self.started += 1
        self.facade.on_request_started(name)
        self.paths[name] = [block(path, n, g) for n in range(len(path)) for g in range(self.groups)]
        self.known[name] = []
        self.done[name] = 0
        if tells:
            self.untold.add(name)
        return name

    def read(self, name: str) -> None:
        """Load the prefix that is here."""
        hits = self.facade.lookup_prefix(self.paths[name], name) or 0
        self._knows(name, hits)
        self.facade.prepare_load(self.paths[name][:hits], name, **self._order(name))
        self.facade.complete_load(self.paths[name][:hits], name)
        self.done[name] = max(self.done[name], hits)

    def write(self, name: str, count: int) -> None:
        """Store the next blocks."""
        start = self.done[name]
        self.done[name] = end = min(start + count * self.groups, len(self.paths[name]))
        keys = self.paths[name][start:end]
        if keys:
            self._knows(name, end, start)
            grant = self.facade.prepare_store(keys, name, **self._order(name))
            self.facade.complete_store([] if grant is None else grant.keys, name)

    def touch(self, name: str) -> None:
        """Use what it has by now."""
        self._knows(name, self.done[name])
        self.facade.touch(self.paths[name][: self.done[name]], name)

    def end(self, name: str) -> None:
        """End a request."""
        self.facade.on_request_finished(name, self.paths[name])
        for book in (self.paths, self.known, self.done):
            del book[name]

    def _order(self, name: str) -> dict[str, Any]:
        if name not in self.untold:
            return {}
        self.untold.remove(name)
        return {"order": RequestOrder(0, tuple(self.paths[name]))}

    def _knows(self, name: str, end: int, start: int = 0) -> None:
        path = self.paths[name]
        new = path if name in self.untold else path[start:end]
        known = {*self.known[name], *new}
        self.known[name] = [key for key in path if key in known]

    def _foresee(self, _actor: Actor, message: Message) -> None:
        if isinstance(message, m.Victims):
            self._before = self.runtime.primary.resident()

    def _observe(self, _actor: Actor, message: Message) -> None:
        if not isinstance(message, m.Victims):
            return
        gone = self._before - self.runtime.primary.resident()
        for name, known in self.known.items():
            heads = [number for number, key in enumerate(known) if key in gone]
            for key in known[heads[0] :] if heads else ():
                assert not self._can_go(key), f"{name} lost number {heads[0]}, and not {key!r}"

    def _can_go(self, key: Key) -> bool:
        primary = self.runtime.primary
        slot = primary.slot_of(key)
        if slot is None or slot in self.slots.hits or key in primary._eviction.excluded:
            return False
        return not self.slots.is_held(slot)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_head_that_another_request_brought_goes_after_its_users_tail(
    policy: type[EvictionPolicy],
) -> None:
    """In four slots: one request brings A, another uses it and stores B and C behind it."""
    engine = Engine(policy, 4)
    engine.write(engine.start("A", tells=False), 1)
    engine.end("r0")
    user = engine.start("ABC", tells=False)
    engine.read(user)
    engine.let_pass(1.5)
    engine.write(user, 2)
    engine.write(engine.start("XY", tells=False), 2)
    assert engine.runtime.primary.slot_of(block("ABC", 0)) is not None
    for number in range(2):  # once it is over, its policy decides
        assert engine.runtime.primary.slot_of(block("XY", number)) is not None


@pytest.mark.parametrize("is_hit", [False, True])
def test_where_one_block_goes_for_two_victims_another_goes_as_well(is_hit: bool) -> None:
    """The block that goes in place of a victim is a victim too; or the first one has to stay."""

    class HeadAndTail(LRUPolicy):
        def choose_victims(self, count: int, exclude: Collection[Key]) -> list[Key]:
            every = sorted(super().choose_victims(len(self), exclude))
            self.restore(every[1:-1])
            return list(dict.fromkeys((every[0], every[-1])))

    engine = Engine(HeadAndTail, 3)
    user, head = engine.start("ABC", tells=True), block("ABC", 0)
    engine.write(user, 3)
    assert not is_hit or engine.facade.lookup(head, user)
    engine.write(engine.start("XY", tells=False), 2)
    assert engine.runtime.primary.resident() == {head, block("XY", 0), block("XY", 1)}
    assert engine.primary.counts.policies_replaced == 0


PATHS = strategies.tuples(
    strategies.sampled_from(["", "A", "AB", "B"]), strategies.text("ABC", min_size=1, max_size=3)
)
MOVES = strategies.lists(
    strategies.tuples(
        strategies.sampled_from(["start", "start", "store", "store", "store", "touch", "end"]),
        PATHS.map("".join),
        strategies.integers(0, REQUESTS_MAX - 1),
        strategies.integers(1, 3),
        strategies.booleans(),
        strategies.sampled_from([1.5, 0.1, 0.0]),
    ),
    min_size=20,
    max_size=40,
)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_running_requests_tail_goes_before_its_head(
    policy: type[EvictionPolicy], groups: int
) -> None:
    """Whatever requests share, and whoever brought it."""

    @settings(max_examples=examples(40), derandomize=TIMES == 1, database=None)
    @given(slots=strategies.sampled_from([4, 5, 6, 8]), moves=MOVES)
    def play(slots: int, moves: list[tuple[Any, ...]]) -> None:
        engine = Engine(policy, slots * groups, groups)
        for verb, path, which, count, tells, seconds in moves:
            name = list(engine.paths)[which % len(engine.paths)] if engine.paths else None
            if verb == "start" and len(engine.paths) < REQUESTS_MAX:
                engine.read(engine.start(path, tells=tells))
            elif verb == "store" and name:
                engine.write(name, count)
            elif verb == "touch" and name:
                engine.touch(name)
            elif verb == "end" and name:
                engine.end(name)
            if seconds:
                engine.let_pass(seconds)
        assert not engine.runtime.cell.faults
        known = engine.runtime.engine.policy.policy
        assert len(known) == len(engine.runtime.primary.resident())

    play()


def test_orders_that_contradict_one_another_lead_round_in_no_circle() -> None:
    """vLLM's don't; whoever calls the facade with others gets an order all the same."""
    prefixes = RunningPrefixes()
    for request, order in (("r", (b"A", b"B")), ("s", (b"B", b"A"))):
        prefixes.start(request)
        prefixes.use(request, order)
    assert prefixes.begin_eviction([b"A"])
    assert prefixes.stand_in(b"A", lambda _: True) in (b"A", b"B")


def test_what_calls_bring_is_put_in_order() -> None:
    """Before the next block that is known, else last; and what is told later counts more."""
    prefixes = RunningPrefixes()
    prefixes.start("r")
    for chain in ((b"C", b"D"), (b"A", b"C"), (b"B", b"C", b"D", b"E"), (b"E", b"F")):
        prefixes.use("r", chain)
    assert prefixes.begin_eviction([b"A"])
    prefix = prefixes._prefix_of["r"]
    assert prefix.order == [b"A", b"B", b"C", b"D", b"E", b"F"]
    prefixes.use("r", (b"Z",), RequestOrder(0, (b"F", b"E", b"A")))
    prefixes.use("r", (b"Z",), RequestOrder(2, (b"B",)))
    prefixes.use("r", (b"Y",))
    assert prefixes.begin_eviction([b"E"])
    assert prefix.order == [b"F", b"E", b"B"]
    assert prefixes.stand_in(b"F", lambda key: key != b"B") == b"E"


def test_what_is_kept_of_requests_that_ended_is_bounded() -> None:
    """By what is kept of those that run; and of one that runs for ever by its keys."""
    prefixes = RunningPrefixes()
    prefixes.start("forever")
    for number in range(2_000):
        prefixes.start(f"r{number}")
        keys = tuple(block(f"{number}-{n}", 9) for n in range(8))
        prefixes.use(f"r{number}", keys)
        prefixes.use("forever", keys[:1] if number < 16 else (block("0-0", 9),))
        if number % 3:
            prefixes.begin_eviction(keys)
        prefixes.end(f"r{number}")
        assert len(prefixes._keys) <= 2 * 16 + 8
        assert set(prefixes._prefix_of) == {"forever"}
        assert len(prefixes._changed) <= 1
        assert sys.getsizeof(prefixes._prefix_of["forever"]._chains) < 300
    prefixes.end("forever")
    assert not prefixes._keys
