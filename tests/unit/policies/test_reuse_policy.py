"""The reuse policy: what it learns, whom it chooses, and that its tree stays a tree.

The slow model has the same statistics and index, and finds each victim by looking at every node.
"""

from __future__ import annotations

import copy
import weakref
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies

from kvtier.policies.eviction.reuse.cohorts import Cohorts
from kvtier.policies.eviction.reuse.ghosts import Ghosts
from kvtier.policies.eviction.reuse.model import (
    _WIDTHS,
    AGE_BINS,
    BINS_FROM,
    ReuseModel,
    age_bin,
)
from kvtier.policies.eviction.reuse.policy import ReusePolicy
from kvtier.policies.eviction.reuse.tree import ASIDE, FRONT, Node, PrefixTree
from kvtier.policies.eviction.reuse.tree import keys_of as keys_in
from tests.support.examples import examples

if TYPE_CHECKING:
    from numpy.typing import NDArray

Step = tuple[Any, ...]
GROUPS = [b"\0\0\0\0", b"\0\0\0\1"]


def key(name: str, group: int = 0) -> bytes:
    return name.encode() * 32 + GROUPS[group]


def keys_of(names: str, group: int = 0) -> list[bytes]:
    return [key(name, group) for name in names]


def names_of(keys: list[bytes]) -> str:
    return b"".join(each[:1] for each in keys).decode()


def serve(policy: ReusePolicy, names: str, request: str) -> None:
    """Let a request find what is resident, store the rest, and end."""
    keys = keys_of(names)
    policy.touch([each for each in keys if each in policy], request)
    policy.admit([each for each in keys if each not in policy], request, held=False)
    policy.end_request(request, keys)


# --- the slow model ---


def standing_in(tree: PrefixTree, cohort: int) -> list[Node]:
    """Return the nodes of a queue, the first to go in front."""
    queue = tree.queues[cohort]
    returned = [n for n in reversed(queue.returned) if n.place == FRONT and n.cohort == cohort]
    return [*dict.fromkeys(returned), *(queue.at[place] for place in sorted(queue.at))]


def victim_by_looking_at_every_node(policy: ReusePolicy, exclude: set[bytes]) -> bytes | None:
    """Return the key that must go next, or None if only what is out of turn is left.

    Of each cohort, the node that was placed first is looked at; of those, the one with the
    lowest index at its age gives its tail.
    """
    tree = policy._tree
    oldest: dict[int, Node] = {}
    for cohort in range(policy._cohorts.count):
        for node in standing_in(tree, cohort):
            tail = keys_in(node)[-1]
            idle = not node.children and not node.busy
            if idle and tail not in policy._held and tail not in exclude:
                oldest[cohort] = node
                break

    def index(cohort: int) -> float:
        if cohort == policy._cohorts.restored:
            return -1.0
        if policy._floor.follows_lru:
            return oldest[cohort].used
        return policy._model.index_of(cohort, policy._now - oldest[cohort].used)

    if not oldest:
        return None
    return keys_in(oldest[min(oldest, key=lambda cohort: (index(cohort), cohort))])[-1]


def check_tree(policy: ReusePolicy) -> None:
    """Check what always holds of the tree and its queues."""
    tree = policy._tree
    live = tree.nodes()
    for node in live:
        assert [key for key, other in tree.node_of.items() if other is node]
    assert sum(len(node.keys) for node in live) == len(tree.node_of)
    standing: Counter[Node] = Counter()
    for cohort, queue in enumerate(tree.queues):
        for place, node in queue.at.items():
            assert node.place == place >= min(queue.first, queue.newest)
        standing.update(standing_in(tree, cohort))
        assert all(node.cohort == cohort for node in standing_in(tree, cohort))
    assert set(standing.values()) <= {1}, "a node stands in one queue, once"
    assert set(standing) <= set(live)
    for node in live:
        assert all(tree.node_of[each] is node for each in keys_in(node))
        assert len(set(keys_in(node))) == len(node.keys)
        assert len({each[-4:] for each in keys_in(node)}) == 1
        assert (node.place != ASIDE) == (node in standing)
        if not node.children and not node.busy:
            assert node in standing, "what may go stands in a queue"
        parent = node.parent
        seen = set()
        while parent is not None and parent in live:
            assert parent not in seen, "a tree has no cycles"
            seen.add(parent)
            assert keys_in(parent)[-1][-4:] == keys_in(node)[-1][-4:]
            parent = parent.parent
    children = Counter(node.parent for node in live)
    busy = Counter(node for running in policy._running.values() for node in running.nodes)
    for node in live:
        assert node.children == children[node]
        assert node.busy == busy[node]


KEYS = strategies.sampled_from([key(name, group) for name in "abcdefghij" for group in (0, 1)])
LISTS = strategies.lists(KEYS, max_size=6)
PATHS = strategies.sampled_from(["abcde", "abcdef", "abcgh", "abi", "abcdefj", "ghj", "a"])
REQUESTS = strategies.sampled_from(["r0", "r1", "r2"])
STEPS = strategies.one_of(
    strategies.tuples(strategies.just("serve"), PATHS, strategies.integers(0, 1)),
    strategies.tuples(strategies.just("admit"), LISTS, REQUESTS, strategies.booleans()),
    strategies.tuples(strategies.just("touch"), LISTS, REQUESTS),
    strategies.tuples(strategies.just("hold"), LISTS),
    strategies.tuples(strategies.just("unhold"), LISTS),
    strategies.tuples(strategies.just("forget"), LISTS),
    strategies.tuples(
        strategies.just("end"), REQUESTS, strategies.none() | LISTS | PATHS.map(keys_of)
    ),
    strategies.tuples(
        strategies.just("choose"), strategies.integers(0, 8), strategies.sets(KEYS, max_size=4)
    ),
    strategies.tuples(strategies.just("restore"), strategies.integers(1, 4)),
    strategies.tuples(strategies.just("follow"), strategies.booleans()),
    strategies.tuples(strategies.just("time"), strategies.floats(0.0, 300.0)),
    strategies.tuples(strategies.just("clear")),
)


class World:
    """A policy, and what its host knows."""

    def __init__(self) -> None:
        self.policy = ReusePolicy(8)
        self.resident: set[bytes] = set()
        self.held: set[bytes] = set()
        self.now = 0.0
        self.served = 0
        self.follows_lru = False

    def step(self, verb: str, *given_) -> None:  # noqa: C901 - one branch for each verb
        policy = self.policy
        if verb == "serve":
            names, group = given_
            self.served += 1
            request, order = f"s{self.served}", keys_of(names, group)
            new = [each for each in order if each not in self.resident]
            policy.touch([each for each in order if each in self.resident], request)
            policy.admit(new, request, held=False)
            policy.end_request(request, order)
            self.resident |= set(new)
        elif verb == "admit":
            policy.admit(given_[0], given_[1], held=given_[2])
            self.resident |= set(given_[0])
            self.held |= set(given_[0]) if given_[2] else set()
        elif verb == "touch":
            policy.touch(*given_)
        elif verb == "hold":
            policy.hold(*given_)
            self.held |= set(given_[0])
        elif verb == "unhold":
            policy.unhold(*given_)
            self.held -= set(given_[0])
        elif verb == "forget":
            policy.forget(*given_)
            self.resident -= set(given_[0])
            self.held -= set(given_[0])
        elif verb == "end":
            policy.end_request(*given_)
        elif verb == "choose":
            self.choose(*given_)
        elif verb == "restore":
            chosen = policy.choose_victims(given_[0], frozenset())
            policy.restore(chosen)
            assert policy.choose_victims(len(chosen), frozenset()) == chosen
            self.resident -= set(chosen)
        elif verb == "follow":
            self.follows_lru = given_[0]
        elif verb == "time":
            self.now += given_[0]
            policy.pass_time(self.now)
        else:
            policy.clear()
            self.resident.clear()
            self.held.clear()

    def choose(self, count: int, exclude: set[bytes]) -> None:
        policy = self.policy
        policy._tree.changed.update(range(policy._cohorts.count))  # the model knows no stale index
        policy._floor.follows_lru = self.follows_lru
        slow = copy.deepcopy(policy, {id(policy._floor): policy._floor})
        slow._look()
        slow._paths._tree = slow._tree
        may_go = self.resident - self.held - exclude
        chosen = policy.choose_victims(count, exclude)
        assert len(set(chosen)) == len(chosen) == min(count, len(may_go))
        assert set(chosen) <= may_go
        for each in chosen:
            expected = victim_by_looking_at_every_node(slow, exclude)
            if expected is None:
                break
            assert each == expected
            assert slow.choose_victims(1, exclude) == [expected]
        self.resident -= set(chosen)


@settings(max_examples=examples(60))
@given(strategies.lists(STEPS, max_size=40))
def test_it_agrees_with_a_model_that_looks_at_every_node(history: list[Step]) -> None:
    world = World()
    for step in history:
        world.step(*step)
        assert len(world.policy) == len(world.resident)
        assert set(world.policy._tree.node_of) == world.resident
        check_tree(world.policy)


@settings(max_examples=examples(40))
@given(strategies.lists(STEPS, max_size=60))
def test_once_all_requests_end_and_nothing_is_held_everything_can_go(history: list[Step]) -> None:
    world = World()
    for step in history:
        world.step(*step)
    for request in ("r0", "r1", "r2"):
        world.policy.end_request(request, None)
    world.policy.unhold(list(world.held))
    assert set(world.policy.choose_victims(99, frozenset())) == world.resident
    assert len(world.policy) == 0
    assert not any(queue.at for queue in world.policy._tree.queues)


# --- order ---


def test_tails_go_before_heads() -> None:
    policy = ReusePolicy(8)
    serve(policy, "abcd", "r")
    assert names_of(policy.choose_victims(4, frozenset())) == "dcba"


def test_before_it_has_learnt_old_requests_go_before_new_ones() -> None:
    policy = ReusePolicy(1024)
    for number, names in enumerate(["abc", "def", "ghi"]):
        policy.pass_time(100.0 * number)
        serve(policy, names, names)
    policy.pass_time(400.0)
    assert names_of(policy.choose_victims(9, frozenset())) == "cbafedihg"


def test_what_branches_share_stays_until_the_last_branch_has_gone() -> None:
    policy = ReusePolicy(16)
    serve(policy, "abcd", "r1")
    serve(policy, "abef", "r2")
    order = names_of(policy.choose_victims(6, frozenset()))
    assert set(order[:4]) == set("cdef")
    assert order[4:] == "ba"
    assert order.index("d") < order.index("c")
    assert order.index("f") < order.index("e")


def test_a_block_that_a_running_request_uses_goes_only_if_nothing_else_can() -> None:
    policy = ReusePolicy(16)
    serve(policy, "ab", "r1")
    serve(policy, "cd", "r2")
    policy.touch(keys_of("ab"), "running")
    assert names_of(policy.choose_victims(2, frozenset())) == "dc"
    assert names_of(policy.choose_victims(2, frozenset())) == "ba"


def test_a_held_tail_keeps_its_ancestors_as_long_as_others_can_go() -> None:
    policy = ReusePolicy(16)
    serve(policy, "abc", "r1")
    serve(policy, "de", "r2")
    policy.hold(keys_of("c"))
    assert names_of(policy.choose_victims(2, frozenset())) == "ed"
    assert names_of(policy.choose_victims(3, frozenset())) == "ba"


def test_what_is_restored_is_the_next_to_go_in_the_same_order() -> None:
    policy = ReusePolicy(16)
    serve(policy, "abcd", "r")
    chosen = policy.choose_victims(2, frozenset())
    policy.restore(chosen)
    assert len(policy) == 4
    assert names_of(policy.choose_victims(4, frozenset())) == "dcba"


def test_the_last_block_of_an_earlier_turn_goes_before_the_conversation() -> None:
    """The next turn filled it up, so its successor has another key."""
    policy = ReusePolicy(16)
    serve(policy, "abcx", "turn 1")
    serve(policy, "abcdefy", "turn 2")
    tree = policy._tree
    assert tree.node_of[key("x")].cohort == policy._cohorts.superseded
    assert tree.node_of[key("x")].parent is None


def test_blocks_stored_after_their_request_ended_hang_where_its_order_says() -> None:
    """A slow tier stores them when the request is over; it is then told of the end again."""
    policy = ReusePolicy(16)
    policy.end_request("r", keys_of("abcd"))
    policy.admit(keys_of("cd"), "r", held=False)
    policy.end_request("r", None)
    policy.admit(keys_of("ab"), "r", held=False)
    policy.end_request("r", None)
    assert names_of(policy.choose_victims(4, frozenset())) == "dcba"


def test_a_request_that_never_ends_keeps_its_blocks_for_one_turnover_only() -> None:
    policy = ReusePolicy(4)
    policy.admit(keys_of("ab"), "lost", held=False)
    for name in "cdefgh":
        serve(policy, name, name)
    assert "lost" not in policy._running


def test_a_conversation_has_fewer_nodes_than_turns() -> None:
    policy = ReusePolicy(1024)
    order: list[bytes] = []
    for turn in range(64):
        order.append(turn.to_bytes(32, "little") + GROUPS[0])
        policy.touch(order[:-1], str(turn))
        policy.admit(order[-1:], str(turn), held=False)
        policy.end_request(str(turn), order)
    assert len(policy._tree.nodes()) <= 10


# --- learning ---


def test_it_learns_that_some_requests_come_back_and_others_do_not() -> None:
    """Conversations of two blocks go on; documents of eight are read once."""
    policy = ReusePolicy(4096)
    for number in range(400):
        policy.pass_time(number * 10.0)
        talk = [(2 * number + i).to_bytes(32, "little") + GROUPS[0] for i in range(2)]
        page = [(9**9 + 8 * number + i).to_bytes(32, "little") + GROUPS[0] for i in range(8)]
        more = [(10**12 + number).to_bytes(32, "little") + GROUPS[0]]
        for name, order in (("talk", talk), ("page", page), ("more", talk + more)):
            request = f"{name} {number}"
            new = [each for each in order if each not in policy]
            policy.touch(order[: len(order) - len(new)], request)
            policy.admit(new, request, held=False)
            policy.end_request(request, order)
    first, (gains, _) = policy._cohorts.first, gains_and_costs(policy._model._hazards)
    assert gains[first(2)].sum() > 0.5
    assert gains[first(8), : age_bin(4000.0)].sum() < 0.2


def test_it_learns_from_what_was_evicted_and_came_back() -> None:
    policy = ReusePolicy(8)
    policy.pass_time(0.0)
    serve(policy, "abcd", "r1")
    assert len(policy.choose_victims(4, frozenset())) == 4
    policy.pass_time(60.0)
    serve(policy, "abcdef", "r2")
    returned = list(policy._model._returned)
    assert sum(returned) == pytest.approx(2.0, abs=0.05), "the body and the last block"
    assert {at % AGE_BINS for at, share in enumerate(returned) if share} == {age_bin(60.0)}
    tree = policy._tree
    assert tree.node_of[key("a")].uses == 2


@given(
    strategies.lists(
        strategies.tuples(
            strategies.integers(0, 838), strategies.floats(0.0, 5000.0), strategies.booleans()
        ),
        max_size=60,
    )
)
@settings(max_examples=examples(30))
def test_the_index_is_the_best_ratio_over_all_horizons(
    votes: list[tuple[int, float, bool]],
) -> None:
    model = ReuseModel()
    for cohort, gap, comes_back in votes:
        model.enter(cohort)
        if comes_back:
            model.come_back(cohort, gap, 1.0)
    model.refresh(10_000.0)
    asked = sorted({cohort for cohort, _, _ in votes} | {0})
    gains, costs = gains_and_costs(model._hazards)
    for cohort in asked:
        for start in (0, 3, AGE_BINS - 2):
            best = max(
                gains[cohort, start:end].sum() / costs[cohort, start:end].sum()
                for end in range(start + 1, AGE_BINS + 1)
            )
            assert model.index_of(cohort, starts_at(start)) == pytest.approx(best)
        assert 0.0 <= gains[cohort].sum() <= 1.0, "no more than all of them return"


def gains_and_costs(hazards: NDArray[np.float64]) -> tuple[Any, Any]:
    """Return the chance to return in each bin, and the expected time in the cache there."""
    alive = np.cumprod(1.0 - hazards, axis=-1) / (1.0 - hazards)
    gains = alive * hazards
    return gains, (alive - 0.5 * gains) * _WIDTHS


def starts_at(number: int) -> float:
    """Return the age at which a bin starts."""
    return 0.0 if number == 0 else BINS_FROM * 2.0 ** ((number - 1) / 2)


def test_between_two_bins_the_index_is_between_theirs() -> None:
    model = ReuseModel()
    model.enter(5)
    model.come_back(5, 100.0, 1.0)
    model.refresh(1000.0)
    for number in (0, 1, 7, AGE_BINS - 2):
        ends = [model.index_of(5, starts_at(at)) for at in (number, number + 1)]
        middle = BINS_FROM * 0.8 if number == 0 else starts_at(number) * 2**0.25
        assert min(ends) < model.index_of(5, middle) < max(ends)


def test_a_cohort_that_was_seen_often_believes_its_own_eyes() -> None:
    model = ReuseModel()
    often, never = model.cohorts.first(4), model.cohorts.first(64)
    for now in range(1000):
        model.enter(often)
        model.enter(never)
        model.come_back(often, 30.0, 1.0)
        if now % 100 == 0:
            model.refresh(float(now))
    model.refresh(5000.0)
    seen, (gains, _) = age_bin(1000.0), gains_and_costs(model._hazards)
    assert gains[often, :seen].sum() > 0.8
    assert gains[never, :seen].sum() < 0.2


def test_every_cohort_has_one_number_and_fits_into_a_ghost() -> None:
    cohorts = Cohorts()
    assert cohorts.count == len(cohorts.kind_of) == len(cohorts.turn_of) <= 1024
    seen = {
        cohorts.turn(t, gap, new) for t in range(2, 7) for gap in (0, 40, 1e6) for new in (1, 9)
    }
    assert len(seen) == 5 * 3 * 2


@given(
    strategies.binary(min_size=36, max_size=36),
    strategies.floats(0, 1e6),
    strategies.floats(0, 1e5),
)
def test_a_ghost_comes_back_as_it_went(name: bytes, used: float, later: float) -> None:
    ghosts = Ghosts(16)
    ghosts.remember(name, 700, 0.5, 9, used)
    ghost = ghosts.pop(name, used + later)
    assert ghost is not None
    assert (ghost.cohort, ghost.length) == (700, 9)
    assert ghost.share == pytest.approx(0.5, abs=0.02)
    assert ghost.used == pytest.approx(used, abs=0.6)
    assert ghosts.pop(name, used) is None, "it came back once"


def test_without_a_clock_time_is_counted_in_blocks() -> None:
    policy = ReusePolicy(4)
    serve(policy, "ab", "r1")
    serve(policy, "cd", "r2")
    assert policy._now == 1024.0
    policy.pass_time(7.0)
    assert policy._now == 7.0
    assert {node.used for node in policy._tree.nodes()} == {7.0}, (
        "times on another scale say nothing"
    )


def test_requests_within_a_second_have_an_order() -> None:
    policy = ReusePolicy(16)
    policy.pass_time(5.0)
    for name in "abc":
        serve(policy, name, name)
    tree = policy._tree
    used = [tree.node_of[key(name)].used for name in "abc"]
    assert 5.0 <= used[0] < used[1] < used[2] < 6.0


def test_after_clear_nothing_is_known_or_held() -> None:
    policy = ReusePolicy(6)
    policy.admit(keys_of("ab"), "r", held=True)
    policy.clear()
    assert len(policy) == 0
    serve(policy, "a", "r")
    assert names_of(policy.choose_victims(2, frozenset())) == "a"


def test_a_long_chain_of_nodes_is_freed_without_a_stack_that_deep() -> None:
    """Else the process ends there: a conversation may have a node a turn."""
    tree, parent = PrefixTree(queues=1), None
    keys = [number.to_bytes(8) for number in range(400_000)]
    for one in keys:
        node = tree.add((one,), 0, 0.0)
        tree.set_parent(node, parent)
        parent = node
    del node, parent
    last = weakref.ref(tree)
    del tree
    assert last() is None
