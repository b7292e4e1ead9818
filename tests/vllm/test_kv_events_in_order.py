"""KV events by themselves: in which order vLLM is told what, and what it is told once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from vllm.v1.kv_offload.base import Medium

from kvtier.core.events import PRIMARY, Event, EventKind
from kvtier.vllm.scheduler.kv_events import AGAIN_COST, AT_ONCE, KVEvents, Place

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm.v1.kv_offload.base import OffloadingEvent


def translation(*tiers: Place, self_describing: bool) -> KVEvents:
    return KVEvents(tiers, self_describing=self_describing)


def place(name: str, *, removals: bool = True) -> Place:
    return Place(Medium.STORAGE, None, name, lambda: removals)


def facts(events: Iterable[OffloadingEvent]) -> list[tuple[str | None, bool, list[bytes]]]:
    return [(event.ownership, event.removed, event.keys) for event in events]


def again(key: bytes, *places: str | None) -> list[tuple[str | None, bool, list[bytes]]]:
    """Return what is told of a block that is announced once more wherever it is."""
    return [(each, removed, [key]) for each in places for removed in (True, False)]


def test_without_descriptions_all_is_announced_at_once() -> None:
    """llm-d then takes hashes that it knows from the GPU's events."""
    events = translation(place("disk"), self_describing=False)
    told = events.drain([Event(EventKind.STORED, (b"a", b"b"), 0)])
    assert facts(told) == [("disk", False, [b"a", b"b"])]


def test_what_a_reset_leaves_is_announced_again_without_descriptions() -> None:
    """``AllBlocksCleared`` took it from routers, too."""
    events = translation(place("disk"), self_describing=False)
    events.drain([Event(EventKind.STORED, (b"a",), 0)])
    events.reset([])
    assert facts(events.drain([])) == [("disk", True, [b"a"]), ("disk", False, [b"a"])]
    assert events.drain([]) == []


def test_what_a_reset_took_is_announced_over_some_steps() -> None:
    events = translation(self_describing=False)
    keys = tuple(number.to_bytes(4, "big") for number in range(2 * AT_ONCE + 1))
    events.drain([Event(EventKind.STORED, keys, PRIMARY)])
    events.reset([Event(EventKind.CLEARED, (), PRIMARY)])
    told = []
    while events.is_behind():
        told.append(sum(len(event.keys) for event in events.drain([])))
    assert told == [AT_ONCE, AT_ONCE, 1]


def burst_of(count: int) -> tuple[bytes, ...]:
    return tuple(number.to_bytes(4, "big") for number in range(count))


def test_what_a_tier_loses_at_once_is_announced_over_some_steps() -> None:
    """It was one message of 200,000 hashes, and a step that took as long as vLLM takes for them."""
    events = translation(place("disk"), self_describing=False)
    keys = burst_of(2 * AT_ONCE + 1)
    events.drain([Event(EventKind.STORED, keys, 0)])
    told = [events.drain([Event(EventKind.REMOVED, keys, 0)])]
    while events.is_behind():
        told.append(events.drain([]))
    assert [sum(len(event.keys) for event in each) for each in told] == [AT_ONCE, AT_ONCE, 1]


@pytest.mark.parametrize("is_stored_last", [True, False])
def test_what_is_stored_again_while_its_removal_waits_is_there_in_the_end(
    is_stored_last: bool,
) -> None:
    """A router that counts is told of the removal first, and of neither twice."""
    events = translation(place("disk"), self_describing=False)
    keys = burst_of(2 * AT_ONCE + 1)
    again = keys[-1]
    told = [*events.drain([Event(EventKind.STORED, keys, 0)])]
    told += events.drain([Event(EventKind.REMOVED, keys, 0)])
    told += events.drain([Event(EventKind.STORED, (again,), 0)])
    if not is_stored_last:
        told += events.drain([Event(EventKind.REMOVED, (again,), 0)])
    while events.is_behind():
        told += events.drain([])
    of_it = [event.removed for event in told if again in event.keys]
    assert of_it == [False, True, False, *([] if is_stored_last else [True])]


def test_blocks_that_another_tier_of_the_medium_has_count_for_several_of_a_step() -> None:
    """Each is announced again, by two events more."""
    events = translation(place("disk"), place("fs"), self_describing=False)
    keys = burst_of(AT_ONCE)
    events.drain([Event(EventKind.STORED, keys, number) for number in (0, 1)])
    told = events.drain([Event(EventKind.REMOVED, keys, 0)])
    assert len(told) == 3 * AT_ONCE // AGAIN_COST
    assert facts(told[:3]) == [("disk", True, [keys[0]]), *again(keys[0], "fs")]


def test_blocks_of_many_hashes_count_for_several_of_a_step() -> None:
    events = KVEvents([place("disk")], self_describing=False, hashes_a_block=16)
    keys = burst_of(AT_ONCE)
    events.drain([Event(EventKind.STORED, keys, 0)])
    (told,) = events.drain([Event(EventKind.REMOVED, keys, 0)])
    assert len(told.keys) == AT_ONCE // 4


def test_a_removal_that_waits_is_announced_while_vllm_can_name_the_block() -> None:
    """vLLM's tracker forgets it with the last tier that will tell.

    Of a block of several hashes it names the last alone after that, and routers keep the others.
    """
    events = translation(place("fs", removals=False), self_describing=True)
    keys = burst_of(3 * AT_ONCE)
    last = keys[-1]
    events.describe(keys, {})
    events.drain([Event(EventKind.STORED, keys, number) for number in (PRIMARY, 0)])
    events.drain([Event(EventKind.REMOVED, keys, 0)])
    told = events.drain([Event(EventKind.REMOVED, (last,), PRIMARY)])
    assert [event.ownership for event in told if last in event.keys] == [None, "fs"]


def test_a_load_that_came_to_nothing_hides_no_block_of_a_tier_of_that_medium() -> None:
    """vLLM 0.32 has no event for it alone: the block is announced, and removed."""
    memory_tier = Place(Medium.CPU, None, "memory", lambda: True)
    events = translation(memory_tier, self_describing=True)
    events.describe([b"a"], {})
    told = events.drain(
        [Event(EventKind.STORED, (b"a",), 0), Event(EventKind.LAPSED, (b"a",), PRIMARY)]
    )
    heard = [event for event in told if not getattr(event, "metadata_only", False)]
    assert not heard[-1].removed
    assert facts(events.drain([Event(EventKind.REMOVED, (b"a",), 0)])) == [("memory", True, [b"a"])]


def test_a_tail_that_a_tier_of_the_medium_keeps_is_announced_before_its_head_is_gone() -> None:
    """llm-d drops a block whose head it doesn't know, and doesn't find it when that is back."""
    memory_tier = Place(Medium.CPU, None, "memory", lambda: True)
    events = translation(memory_tier, self_describing=True)
    head, tail = b"head", b"tail"
    events.describe([head, tail], {tail: head})
    events.drain(
        [Event(EventKind.STORED, (head, tail), PRIMARY), Event(EventKind.STORED, (tail,), 0)]
    )
    told = facts(events.drain([Event(EventKind.REMOVED, (tail, head), PRIMARY)]))
    assert told == [
        (None, True, [tail]),
        ("memory", True, [tail]),
        ("memory", False, [tail]),
        (None, True, [head]),
    ]


def test_a_tier_tells_of_each_block_once() -> None:
    """Whoever counts would otherwise wait for two removals."""
    events = translation(place("disk"), self_describing=False)
    stored = Event(EventKind.STORED, (b"a",), 0)
    assert facts(events.drain([stored, stored])) == [("disk", False, [b"a"])]
    assert events.drain([stored]) == []
    removed = Event(EventKind.REMOVED, (b"a",), 0)
    assert facts(events.drain([removed, removed])) == [("disk", True, [b"a"])]


def test_a_removal_is_expected_of_tiers_that_will_tell() -> None:
    """vLLM keeps a description until then: of a tier that never tells, it would for ever."""
    events = translation(place("disk"), place("fs", removals=False), self_describing=True)
    events.describe([b"a"], {})
    told = events.drain([Event(EventKind.STORED, (b"a",), number) for number in (PRIMARY, 0, 1)])
    assert [event.removal_expected for event in told] == [True, True, False]


HEAD, MIDDLE, TAIL = b"head", b"middle", b"tail"
CHAIN_KEYS = (HEAD, MIDDLE, TAIL)
CHAIN = {MIDDLE: HEAD, TAIL: MIDDLE}


def test_what_was_announced_while_its_head_was_nowhere_is_announced_again_with_the_head() -> None:
    """llm-d dropped it, and found it no more though head and tail were there."""
    events = translation(place("disk"), self_describing=True)
    events.describe(CHAIN_KEYS, CHAIN)
    events.drain([Event(EventKind.STORED, CHAIN_KEYS, PRIMARY)])
    events.drain([Event(EventKind.REMOVED, (HEAD,), PRIMARY)])
    told = facts(events.drain([Event(EventKind.STORED, (MIDDLE, TAIL), 0)]))
    assert told == [("disk", False, [MIDDLE, TAIL])]
    events.describe([HEAD], CHAIN)
    told = facts(events.drain([Event(EventKind.STORED, (HEAD,), PRIMARY)]))
    assert told == [
        (None, False, [HEAD]),
        *(fact for key in (MIDDLE, TAIL) for fact in again(key, None, "disk")),
    ]
    assert facts(events.drain([Event(EventKind.REMOVED, (HEAD,), PRIMARY)])) == [
        (None, True, [HEAD])
    ]


def test_an_orphan_that_is_gone_is_not_announced_again() -> None:
    events = translation(place("disk"), self_describing=True)
    events.describe([MIDDLE, TAIL], CHAIN)
    events.drain([Event(EventKind.STORED, (MIDDLE, TAIL), PRIMARY)])
    events.drain([Event(EventKind.REMOVED, (MIDDLE, TAIL), PRIMARY)])
    events.describe([HEAD], CHAIN)
    told = facts(events.drain([Event(EventKind.STORED, (HEAD,), PRIMARY)]))
    assert told == [(None, False, [HEAD])]


def test_a_tail_that_a_tier_tells_of_before_its_head_is_told_again_after_it() -> None:
    events = translation(place("disk"), self_describing=True)
    events.describe([HEAD, MIDDLE], CHAIN)
    told = facts(events.drain([Event(EventKind.STORED, (MIDDLE, HEAD), 0)]))
    assert told == [("disk", False, [MIDDLE, HEAD]), *again(MIDDLE, "disk")]
