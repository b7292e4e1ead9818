"""The reuse policy's floor: it sees when LRU would hit more, and follows it then."""

from __future__ import annotations

import pytest

from kvtier.policies.eviction.lru import LRUPolicy
from kvtier.policies.eviction.reuse.floor import SHARE_MAX, Floor
from kvtier.policies.eviction.reuse.policy import ReusePolicy

GROUP = bytes(4)
CAPACITY = 400


def keys_of(document: int, blocks: int = 40) -> list[bytes]:
    """Return the keys of a document's blocks, from head to tail."""
    return [(document * 1000 + block).to_bytes(8) + GROUP for block in range(blocks)]


def sample(floor: Floor, keys: list[bytes]) -> list[bytes]:
    return floor.sample(keys, b"".join(keys))


def bring(floor: Floor, documents: range) -> None:
    """Let requests bring these documents, none of which they find resident."""
    for document in documents:
        sampled = sample(floor, keys_of(document))
        floor.end_request(sampled, 0, sampled)


def find(floor: Floor, documents: range) -> None:
    """Let requests use these documents, all of which they find resident."""
    for document in documents:
        sampled = sample(floor, keys_of(document))
        floor.end_request(sampled, len(sampled), sampled)


def test_what_lru_would_have_hit_and_is_brought_again_makes_it_ahead() -> None:
    floor = Floor(CAPACITY)
    bring(floor, range(5))
    assert not floor.follows_lru
    for _ in range(3):
        bring(floor, range(5))
    assert floor.follows_lru


def test_a_hit_that_lru_would_not_have_outweighs_one_that_only_lru_would() -> None:
    floor = Floor(CAPACITY)
    for number in range(50):
        bring(floor, range(2))  # LRU has them, the tier does not
        bring(floor, range(100 + 20 * number, 110 + 20 * number))
        find(floor, range(5))  # the tier has them, LRU does not
    assert not floor.follows_lru


def test_what_is_stored_without_an_order_takes_its_room_under_lru_too() -> None:
    floor = Floor(CAPACITY)
    for number in range(50):
        bring(floor, range(5))
        for document in range(1000 + 20 * number, 1020 + 20 * number):
            floor.store(keys_of(document))
    assert not floor.follows_lru


def test_new_blocks_alone_are_no_difference() -> None:
    floor = Floor(CAPACITY)
    bring(floor, range(500))
    assert not floor.follows_lru


def turnovers_of_lru(floor: Floor, first: int) -> int:
    """Let the prediction lose, and return how many new documents come until it is tried again."""
    while not floor.follows_lru:
        bring(floor, range(5))
    document = first
    while floor.follows_lru:
        bring(floor, range(document, document + 1))
        document += 1
    return document - first


def test_the_prediction_is_tried_again_each_time_later() -> None:
    floor = Floor(CAPACITY)
    first = turnovers_of_lru(floor, 1000)
    second = turnovers_of_lru(floor, 2000)
    assert first > 0
    assert second == pytest.approx(2 * first, rel=0.2)


def test_after_clear_the_prediction_is_followed() -> None:
    floor = Floor(CAPACITY)
    while not floor.follows_lru:
        bring(floor, range(5))
    floor.clear()
    assert not floor.follows_lru


def test_what_is_forgotten_is_no_hit_of_lrus() -> None:
    floor = Floor(CAPACITY)
    for _ in range(50):
        bring(floor, range(5))
        for document in range(5):
            floor.forget(keys_of(document))
    assert not floor.follows_lru


@pytest.mark.parametrize("capacity", [1, 400, 20_000, 1_000_000])
def test_the_sample_is_a_small_share_of_neighbouring_keys_too(capacity: int) -> None:
    floor = Floor(capacity)
    keys = keys_of(7, blocks=2560)
    sampled = sample(floor, keys)
    share = sum(floor._chosen)
    assert 1 <= share <= SHARE_MAX
    assert len(sampled) == pytest.approx(10 * share, rel=0.1)
    assert sampled == [key for key in keys if sample(floor, [key])]


def test_keys_of_unequal_lengths_are_sampled_too() -> None:
    floor = Floor(CAPACITY)
    keys = [bytes([0]) * length for length in range(40)]
    assert sample(floor, keys) == keys[1:], "byte 0 is in every sample, and no key is empty"


def test_in_lrus_order_it_chooses_what_lru_would() -> None:
    policy, lru = ReusePolicy(CAPACITY), LRUPolicy(CAPACITY)
    policy._floor.follows_lru = True
    for number in range(120):
        document = number * number % 23
        keys = keys_of(document)
        for each in (policy, lru):
            each.pass_time(float(number // 4))
            found = [key for key in keys if key in each]
            each.touch(found, f"{number}")
            surplus = len(each) + len(keys) - len(found) - CAPACITY
            victims = each.choose_victims(surplus, frozenset(keys)) if surplus > 0 else []
            each.admit([key for key in keys if key not in found], f"{number}", held=False)
            each.end_request(f"{number}", keys)
            assert len(victims) == max(0, surplus)
        policy._floor.follows_lru = True
        assert {key for key in keys if key in policy} == {key for key in keys if key in lru}
    both = sum(key in policy and key in lru for document in range(23) for key in keys_of(document))
    assert both == len(policy) == len(lru)


def hits(policy: ReusePolicy | LRUPolicy, documents: list[int]) -> int:
    """Let requests use these documents, one a second, and return how many blocks they hit."""
    count = 0
    for number, document in enumerate(documents):
        policy.pass_time(float(number))
        keys, request = keys_of(document), f"{number}"
        found = [key for key in keys if key in policy]
        count += len(found)
        policy.touch(found, request)
        surplus = len(policy) + len(keys) - len(found) - CAPACITY
        if surplus > 0:
            policy.choose_victims(surplus, frozenset(keys))
        policy.admit([key for key in keys if key not in found], request, held=False)
        policy.end_request(request, keys)
    return count


def test_a_prediction_that_is_always_wrong_costs_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """It drops what was used last. A document is used for some seconds, and then no more."""
    documents = [max(0, number // 4 - number % 4) for number in range(1500)]
    policy, left_alone = ReusePolicy(CAPACITY), ReusePolicy(CAPACITY)
    for each in (policy, left_alone):
        monkeypatch.setattr(each._model, "index_of", lambda _, age: age)
    monkeypatch.setattr(left_alone._floor, "_follow", lambda **_: None)
    reachable = hits(LRUPolicy(CAPACITY), documents)
    assert hits(policy, documents) > 0.9 * reachable
    assert hits(left_alone, documents) < 0.6 * reachable
