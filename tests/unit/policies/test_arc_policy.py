"""ARC: what two requests used is kept from a scan; ghosts move the target; tails before heads.

Each letter is a block, and a word is a prompt from its head to its tail.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import given, settings, strategies

from kvtier.policies.eviction.arc import ARCPolicy
from tests.support.examples import examples

HELD_EVERY = 5
"""One request in so many may hold its blocks: what the model holds, it never releases."""


def keys_of(text: str) -> list[bytes]:
    return [letter.encode() for letter in text]


def admit(policy: ARCPolicy, text: str, request: str) -> None:
    policy.admit(keys_of(text), request, held=False)


def victims(policy: ARCPolicy, count: int) -> str:
    return b"".join(policy.choose_victims(count, frozenset())).decode()


def test_tails_go_before_heads_and_old_requests_before_new_ones() -> None:
    policy = ARCPolicy(8)
    admit(policy, "abc", "r1")
    admit(policy, "def", "r2")
    assert victims(policy, 4) == "cbaf"


def test_blocks_that_two_requests_used_outlive_a_scan() -> None:
    policy = ARCPolicy(6)
    admit(policy, "ab", "r1")
    policy.touch(keys_of("ab"), "r2")
    for number, scanned in enumerate(["cd", "ef", "gh"]):
        admit(policy, scanned, f"scan {number}")
    assert victims(policy, 6) == "dcfehg"
    assert victims(policy, 6) == "ba"


def test_a_request_that_uses_its_own_blocks_again_does_not_make_them_frequent() -> None:
    policy = ARCPolicy(4)
    admit(policy, "ab", "r1")
    policy.touch(keys_of("ab"), "r1")
    admit(policy, "c", "r2")
    assert victims(policy, 3) == "bac"


def test_a_recent_ghost_that_comes_back_is_frequent_and_gives_recent_blocks_more_room() -> None:
    policy = ARCPolicy(2)
    admit(policy, "ab", "r1")
    policy.touch(keys_of("a"), "r2")  # a is frequent, b recent
    assert victims(policy, 1) == "b"
    admit(policy, "b", "r3")  # b comes back: frequent, and the target of recent blocks is 1
    assert victims(policy, 1) == "a"
    admit(policy, "c", "r4")
    assert victims(policy, 1) == "b", "one recent block is within the target"
    assert victims(policy, 1) == "c", "nothing else is left"


def test_a_frequent_ghost_that_comes_back_takes_the_room_again() -> None:
    policy = ARCPolicy(2)
    admit(policy, "ab", "r1")
    policy.touch(keys_of("a"), "r2")
    assert victims(policy, 1) == "b"
    admit(policy, "b", "r3")
    assert victims(policy, 1) == "a"
    admit(policy, "a", "r4")  # a frequent ghost: the target of recent blocks is 0 again
    admit(policy, "c", "r5")
    assert victims(policy, 1) == "c"


def test_what_is_held_stays_held_when_it_becomes_frequent() -> None:
    policy = ARCPolicy(4)
    policy.admit(keys_of("ab"), "r1", held=True)
    policy.touch(keys_of("a"), "r2")
    assert victims(policy, 4) == ""
    policy.unhold(keys_of("a"))
    assert victims(policy, 4) == "a"


def test_what_is_restored_is_the_next_to_go() -> None:
    policy = ARCPolicy(4)
    admit(policy, "abc", "r1")
    chosen = policy.choose_victims(2, frozenset())
    policy.restore(chosen)
    assert len(policy) == 3
    assert victims(policy, 3) == "cba"


def test_room_for_many_blocks_is_made_as_if_they_came_one_after_the_other() -> None:
    policy = ARCPolicy(4)
    admit(policy, "abcd", "r1")
    policy.touch(keys_of("ab"), "r2")  # a and b are frequent
    assert victims(policy, 1) == "d"
    admit(policy, "d", "r3")  # back: frequent, and the target of recent blocks is 1
    assert victims(policy, 3) == "cba", "one frequent block, which is all that the target asks for"


def test_a_use_in_the_gpu_counts_when_the_request_ends() -> None:
    policy = ARCPolicy(4)
    admit(policy, "ab", "r1")
    policy.end_request("r1", keys_of("ab"))
    policy.end_request("r2", keys_of("xa"))
    admit(policy, "c", "r3")
    assert victims(policy, 3) == "bca"


class SlowARC:
    """The same in the most obvious way: the paper's lists, the next to go first.

    Requests come one after the other. Held is held for good.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.recent: list[bytes] = []
        self.frequent: list[bytes] = []
        self.recent_ghosts: list[bytes] = []
        self.frequent_ghosts: list[bytes] = []
        self.target = 0.0
        self.held: set[bytes] = set()

    def resident(self) -> list[bytes]:
        return self.recent + self.frequent

    def request(self, order: list[bytes], *, held: bool) -> None:
        brought = []
        frequent = []
        for key in order:
            ghosts = len(self.recent_ghosts), len(self.frequent_ghosts)
            if key in self.resident():
                frequent.append(key)
            elif key in self.recent_ghosts:
                self.target = min(self.capacity, self.target + max(1, ghosts[1] / ghosts[0]))
                self.recent_ghosts.remove(key)
                frequent.append(key)
            elif key in self.frequent_ghosts:
                self.target = max(0, self.target - max(1, ghosts[0] / ghosts[1]))
                self.frequent_ghosts.remove(key)
                frequent.append(key)
            else:
                brought.append(key)
            self.held |= {key} if held and key not in self.resident() else set()
        self.recent = [key for key in self.recent if key not in frequent] + brought[::-1]
        self.frequent = [key for key in self.frequent if key not in frequent] + frequent[::-1]

    def choose_victims(self, count: int, exclude: list[bytes]) -> list[bytes]:
        kept = {*self.held, *exclude}
        recent = [key for key in self.recent if key not in kept]
        frequent = [key for key in self.frequent if key not in kept]
        length = len(self.recent)
        wanted = min(count, len(recent) + len(frequent))
        first_from_frequent = max(0, int(self.target) + 1 - length)
        from_frequent = min(len(frequent), max(min(wanted, first_from_frequent), 0))
        from_recent = min(len(recent), wanted - from_frequent)
        from_frequent = wanted - from_recent
        chosen = recent[:from_recent], frequent[:from_frequent]
        self.recent = [key for key in self.recent if key not in chosen[0]]
        self.frequent = [key for key in self.frequent if key not in chosen[1]]
        self.recent_ghosts += chosen[0]
        self.frequent_ghosts += chosen[1]
        while self.recent_ghosts and len(self.recent + self.recent_ghosts) > self.capacity:
            self.recent_ghosts.pop(0)
        ghosts = self.recent_ghosts, self.frequent_ghosts
        while ghosts[1] and len(self.resident() + ghosts[0] + ghosts[1]) > 2 * self.capacity:
            ghosts[1].pop(0)
        return chosen[0] + chosen[1]


@dataclass(frozen=True)
class Visit:
    """One request, and then the room that must be made."""

    order: list[bytes]  #: the request's keys, from head to tail
    may_hold: bool
    count: int  #: of victims
    exclude: list[bytes]


NUMBERS = strategies.integers(0, 20).map(lambda number: b"%d" % number)
SOME = strategies.lists(NUMBERS, unique=True, max_size=6)
VISITS = strategies.builds(Visit, SOME, strategies.booleans(), strategies.integers(0, 5), SOME)


@settings(max_examples=examples(100))
@given(history=strategies.lists(VISITS, max_size=40))
def test_it_agrees_with_a_slow_obvious_model(history: list[Visit]) -> None:
    policy, model = ARCPolicy(6), SlowARC(6)
    for number, visit in enumerate(history):
        request, held = f"r{number}", visit.may_hold and number % HELD_EVERY == 0
        new = [key for key in visit.order if key not in policy]
        policy.touch([key for key in visit.order if key in policy], request)
        policy.admit(new, request, held=held)
        policy.end_request(request, visit.order)
        model.request(visit.order, held=held)
        chosen = policy.choose_victims(visit.count, visit.exclude)
        assert chosen == model.choose_victims(visit.count, visit.exclude)
        assert len(policy) == len(model.resident())
        assert policy._recent_target == model.target


KEYS = strategies.sampled_from(keys_of("abcdefgh"))
STEPS = strategies.one_of(
    strategies.tuples(
        strategies.just("admit"), strategies.lists(KEYS, unique=True), strategies.booleans()
    ),
    strategies.tuples(
        strategies.just("touch"), strategies.lists(KEYS, unique=True), strategies.integers(0, 3)
    ),
    strategies.tuples(strategies.just("hold"), strategies.lists(KEYS, unique=True)),
    strategies.tuples(strategies.just("unhold"), strategies.lists(KEYS, unique=True)),
    strategies.tuples(strategies.just("forget"), strategies.lists(KEYS, unique=True)),
    strategies.tuples(strategies.just("choose"), strategies.integers(0, 8), strategies.sets(KEYS)),
    strategies.tuples(strategies.just("end"), strategies.integers(0, 3)),
)


@settings(max_examples=examples(100))
@given(history=strategies.lists(STEPS, max_size=40))
def test_it_gives_what_it_has_and_never_what_is_held_or_excluded(
    history: list[tuple[Any, ...]],
) -> None:
    policy = ARCPolicy(8)
    resident: set[bytes] = set()
    held: set[bytes] = set()
    for number, (verb, *given_) in enumerate(history):
        if verb == "admit":
            new = [key for key in given_[0] if key not in resident]
            policy.admit(new, f"r{number % 4}", held=given_[1])
            resident |= set(new)
            held |= set(new) if given_[1] else set()
        elif verb == "touch":
            policy.touch(given_[0], f"r{given_[1]}")
        elif verb in {"hold", "unhold"}:
            known = [key for key in given_[0] if key in resident]
            getattr(policy, verb)(known)
            held = held | set(known) if verb == "hold" else held - set(known)
        elif verb == "forget":
            policy.forget(given_[0])
            resident -= set(given_[0])
            held -= set(given_[0])
        elif verb == "end":
            policy.end_request(f"r{given_[0]}", None)
        else:
            chosen = policy.choose_victims(given_[0], given_[1])
            assert len(set(chosen)) == len(chosen)
            assert not set(chosen) & (held | given_[1])
            assert len(chosen) == min(given_[0], len(resident - held - given_[1]))
            resident -= set(chosen)
        assert len(policy) == len(resident)
        ghosts = len(policy._recent_ghosts) + len(policy._frequent_ghosts)
        assert ghosts <= 2 * policy.capacity
