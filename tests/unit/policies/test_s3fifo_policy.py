"""S3-FIFO: one-time blocks leave early, used ones go round again, tails before heads."""

from __future__ import annotations

from hypothesis import given, settings, strategies

from kvtier.policies.eviction.s3fifo import LOOKED_AT_MAX, S3FIFOPolicy
from tests.support.examples import examples
from tests.unit.policies._policy_story import Visit, admit, histories, keys_of, play, victims


def use(policy: S3FIFOPolicy, text: str, *requests: str) -> None:
    for request in requests:
        policy.touch(keys_of(text), request)
        policy.end_request(request, keys_of(text))


def test_tails_go_before_heads_and_old_requests_before_new_ones() -> None:
    policy = S3FIFOPolicy(8)
    admit(policy, "abc", "r1")
    admit(policy, "def", "r2")
    assert victims(policy, 4) == "cbaf"


def test_what_two_more_requests_used_outlives_a_scan() -> None:
    policy = S3FIFOPolicy(6)
    admit(policy, "ab", "r1")
    use(policy, "ab", "r2", "r3")
    for number, scanned in enumerate(["cd", "ef", "gh"]):
        admit(policy, scanned, f"scan {number}")
    assert victims(policy, 6) == "dcfehg"
    assert victims(policy, 6) == "ba"


def test_one_more_use_does_not_make_a_block_stay() -> None:
    policy = S3FIFOPolicy(6)
    admit(policy, "ab", "r1")
    use(policy, "a", "r2")
    admit(policy, "c", "r3")
    assert victims(policy, 2) == "ba"


def test_all_that_one_request_does_is_one_use_and_none_if_it_brought_the_block() -> None:
    policy = S3FIFOPolicy(6)
    admit(policy, "ab", "r1")
    for _ in range(3):
        policy.touch(keys_of("b"), "r1")
        policy.touch(keys_of("a"), "r2")
    policy.end_request("r1", keys_of("ab"))
    policy.end_request("r2", keys_of("a"))
    admit(policy, "c", "r3")
    assert victims(policy, 3) == "bac"


def test_a_ghost_that_comes_back_enters_the_main_queue() -> None:
    policy = S3FIFOPolicy(4)
    admit(policy, "ab", "r1")
    assert victims(policy, 1) == "b"
    admit(policy, "b", "r2")
    admit(policy, "c", "r3")
    assert victims(policy, 3) == "acb"


def test_in_the_main_queue_a_used_block_goes_round_again() -> None:
    policy = S3FIFOPolicy(4)
    admit(policy, "abc", "r1")
    assert victims(policy, 3) == "cba"
    admit(policy, "a", "r2")
    admit(policy, "b", "r3")
    use(policy, "a", "r4")
    assert victims(policy, 2) == "ba"


def test_a_request_puts_its_blocks_in_order_when_it_ends() -> None:
    policy = S3FIFOPolicy(4)
    admit(policy, "bc", "r1")
    admit(policy, "a", "r1")
    policy.end_request("r1", keys_of("abc"))
    assert victims(policy, 3) == "cba"


def test_a_call_looks_at_a_bounded_number_of_blocks() -> None:
    """Where all were used, the paper's queue goes round three times, whatever its length."""
    policy = S3FIFOPolicy(4 * LOOKED_AT_MAX)
    blocks = [number.to_bytes(4, "big") for number in range(policy.capacity)]
    policy.admit(blocks, "r1", held=False)
    for request in ("r2", "r3", "r4"):
        policy.end_request(request, blocks)
    before = sum(policy._uses.values())
    assert len(policy.choose_victims(2, frozenset())) == 2
    assert before - sum(policy._uses.values()) <= 3 * LOOKED_AT_MAX
    policy.hold(blocks[:-5])
    assert len(policy.choose_victims(9, frozenset())) <= 5


def test_what_is_restored_is_the_next_to_go() -> None:
    policy = S3FIFOPolicy(4)
    admit(policy, "abc", "r1")
    chosen = policy.choose_victims(2, frozenset())
    policy.restore(chosen)
    assert len(policy) == 3
    assert victims(policy, 3) == "cba"


class SlowS3FIFO:
    """The same in the most obvious way: lists, and one block after the other.

    Requests come one after the other. Held is held for good.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.small: list[bytes] = []  # the next to go first, as are the others
        self.main: list[bytes] = []
        self.ghosts: list[bytes] = []
        self.uses: dict[bytes, int] = {}
        self.held: set[bytes] = set()

    def resident(self) -> list[bytes]:
        return self.small + self.main

    def request(self, order: list[bytes], *, held: bool) -> None:
        new = [key for key in reversed(order) if key not in self.resident()]
        for key in order:
            if key in self.resident():
                self.uses[key] = min(3, self.uses[key] + 1)
        for key in new:
            if key in self.ghosts:
                self.ghosts.remove(key)
                self.main.append(key)
            else:
                self.small.append(key)
            self.uses[key] = 0
        self.held |= set(new) if held else set()

    def choose_victims(self, count: int, exclude: list[bytes]) -> list[bytes]:
        victims: list[bytes] = []
        while len(victims) < count:
            kept = {*self.held, *exclude}
            small = [key for key in self.small if key not in kept]
            main = [key for key in self.main if key not in kept]
            if small and (len(self.small) > self.capacity // 10 or not main):
                self.small.remove(small[0])
                if self.uses[small[0]] >= 2:
                    self.main.append(small[0])
                else:
                    self.ghosts.append(small[0])
                    victims.append(small[0])
            elif main:
                self.main.remove(main[0])
                if self.uses[main[0]]:
                    self.uses[main[0]] -= 1
                    self.main.append(main[0])
                else:
                    victims.append(main[0])
            else:
                break
        self.ghosts = self.ghosts[max(0, len(self.ghosts) - self.capacity * 9 // 10) :]
        return victims


@settings(max_examples=examples(100))
@given(capacity=strategies.sampled_from([5, 20]), history=histories(16))
def test_it_agrees_with_a_slow_obvious_model(capacity: int, history: list[Visit]) -> None:
    policy, model = S3FIFOPolicy(capacity), SlowS3FIFO(capacity)
    for number, visit in enumerate(history):
        play(policy, model, number, visit)
        assert len(policy._ghosts) <= capacity
        assert policy._uses.keys() <= set(model.resident())
        assert not policy._used_by
