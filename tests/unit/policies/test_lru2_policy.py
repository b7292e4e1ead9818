"""LRU-2: the second last use decides; what is gone is remembered; tails before heads."""

from __future__ import annotations

from hypothesis import given, settings

from kvtier.policies.eviction.lru2 import HISTORY_CAPACITIES, LRU2Policy
from tests.support.examples import examples
from tests.unit.policies._policy_story import Visit, admit, histories, keys_of, play, victims


def use(policy: LRU2Policy, text: str, request: str) -> None:
    policy.end_request(request, keys_of(text))


def test_blocks_used_once_go_first_and_the_oldest_of_them_before_the_others() -> None:
    policy = LRU2Policy(8)
    admit(policy, "ab", "r1")
    use(policy, "ab", "r2")
    admit(policy, "cd", "r3")
    admit(policy, "ef", "r4")
    assert victims(policy, 8) == "dcfeba"


def test_the_second_last_use_decides_and_not_the_last() -> None:
    policy = LRU2Policy(8)
    admit(policy, "a", "r1")
    admit(policy, "b", "r2")
    use(policy, "b", "r3")
    use(policy, "a", "r4")  # used last, but before that at the first request
    assert victims(policy, 2) == "ab"


def test_all_uses_by_one_request_are_one() -> None:
    policy = LRU2Policy(8)
    admit(policy, "ab", "r1")
    policy.touch(keys_of("ab"), "r1")
    use(policy, "ab", "r1")
    admit(policy, "c", "r2")
    assert victims(policy, 3) == "bac"


def test_what_comes_back_from_the_history_has_been_used_twice() -> None:
    policy = LRU2Policy(2)
    admit(policy, "ab", "r1")
    assert victims(policy, 1) == "b"
    admit(policy, "b", "r2")
    assert victims(policy, 2) == "ab"


def test_the_history_is_bounded() -> None:
    policy = LRU2Policy(2)
    admit(policy, "ab", "r1")
    assert victims(policy, 2) == "ba"
    for number in range(2 * HISTORY_CAPACITIES):
        policy.admit([b"%d" % number], "scan", held=False)
        policy.choose_victims(1, frozenset())
    admit(policy, "a", "r2")
    admit(policy, "c", "r3")
    assert victims(policy, 1) == "a", "a was new again, and not used twice"


def test_of_what_was_chosen_together_the_first_is_forgotten_first() -> None:
    policy = LRU2Policy(1)
    admit(policy, "abcdef", "r1")
    assert victims(policy, 6) == "fedcba"
    admit(policy, "af", "r2")
    assert victims(policy, 2) == "fa", "f is new again, a was used twice"


def test_what_is_restored_is_the_next_to_go() -> None:
    policy = LRU2Policy(4)
    admit(policy, "abc", "r1")
    chosen = policy.choose_victims(2, frozenset())
    policy.restore(chosen)
    assert len(policy) == 3
    assert victims(policy, 3) == "cba"


class SlowLRU2:
    """The same in the most obvious way: for each key the requests that used it, by number.

    Requests come one after the other. Held is held for good.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.here: list[bytes] = []
        self.gone: list[bytes] = []  # the oldest first
        self.uses: dict[bytes, list[int]] = {}
        self.place: dict[bytes, int] = {}  # counts up from head to tail
        self.held: set[bytes] = set()
        self.now = 0

    def resident(self) -> list[bytes]:
        return self.here

    def request(self, order: list[bytes], *, held: bool) -> None:
        self.now += 1
        for key in [key for key in order if key in self.here] + [
            key for key in order if key not in self.here
        ]:
            self.uses.setdefault(key, []).append(self.now)
            self.place[key] = max(self.place.values(), default=0) + 1
        for key in order:
            if len(self.uses[key]) == 1:
                self.place[key] = max(self.place.values()) + 1
            if key not in self.here:
                self.here.append(key)
                self.held |= {key} if held else set()
            if key in self.gone:
                self.gone.remove(key)

    def choose_victims(self, count: int, exclude: list[bytes]) -> list[bytes]:
        def rank(key: bytes) -> tuple[int, int, int]:
            uses = self.uses[key]
            if len(uses) == 1:
                return (0, uses[-1], -self.place[key])
            return (1, uses[-2], -self.place[key])

        order = sorted(self.here, key=rank)
        chosen = [key for key in order if key not in self.held and key not in exclude][:count]
        for key in chosen:
            self.here.remove(key)
        self.gone += chosen
        while len(self.gone) > HISTORY_CAPACITIES * self.capacity:
            del self.uses[self.gone.pop(0)]
        return chosen


@settings(max_examples=examples(100))
@given(history=histories(31))
def test_it_agrees_with_a_slow_obvious_model(history: list[Visit]) -> None:
    policy, model = LRU2Policy(4), SlowLRU2(4)
    for number, visit in enumerate(history):
        play(policy, model, number, visit)
        assert len(policy._gone) <= HISTORY_CAPACITIES * policy.capacity
        assert len(policy._last_use) == len(policy) + len(policy._gone)
        assert not policy._time_of
