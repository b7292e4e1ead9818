"""The manager tells the order of a request's keys when it loads and stores, from vLLM's positions.

So the blocks that the GPU has already, which no call names, are known to be the head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, strategies
from vllm.v1.kv_offload.base import ReqContext, make_offload_key

from kvtier.vllm.scheduler.groups import TokenOrder
from tests.vllm.support.managers import manager

if TYPE_CHECKING:
    from collections.abc import Sequence


def keys(text: str) -> list[bytes]:
    return [make_offload_key(letter.encode() * 32, 0) for letter in text]


def context(name: str, order: Sequence[bytes]) -> Any:
    made = ReqContext(req_id=name)
    for number, key in enumerate(order, start=1):
        made.set_offload_key_position(key, 16 * number)
    return made


@given(
    parts=strategies.lists(strategies.lists(strategies.integers(1, 40), max_size=6), max_size=6),
    in_order=strategies.booleans(),
)
def test_the_order_that_is_told_part_by_part_is_that_of_the_tokens(
    parts: list[list[int]], in_order: bool
) -> None:
    """Keys of several groups come one group after the other, and a partial tail after all."""
    order = TokenOrder(None)
    ends: dict[bytes, int] = {}
    told: list[bytes] = []
    for number, part in enumerate(parts):
        for place, end in enumerate(part):
            ends[b"%d %d" % (number, place)] = end + 40 * number if in_order else end
        new = order.untold(ends)
        if new is not None:
            told[new.first :] = new.keys
        assert sorted(told) == sorted(ends)
        assert [ends[key] for key in told] == sorted(ends.values())
        assert order.untold(ends) is None


def test_of_one_group_it_is_told_as_it_stands_unless_there_is_a_partial_tail() -> None:
    order = TokenOrder(16)
    ends = {b"a": 16, b"b": 32}
    assert order.untold(ends) == (0, (b"a", b"b"))
    ends[b"c"] = 48
    assert order.untold(ends) == (2, (b"c",))
    ends[b"partial"] = 40
    assert order.untold(ends) == (0, (b"a", b"b", b"partial", b"c"))
    ends[b"d"] = 64
    assert order.untold(ends) == (4, (b"d",))


@pytest.mark.parametrize("policy", ["lru", "reuse", "arc"])
def test_a_head_that_the_gpu_has_stays_as_long_as_its_requests_tail(policy: str) -> None:
    """Nothing but the positions tells that the request which stores B and C begins with A."""
    with manager(eviction_policy=policy) as engine:
        slots = engine._memory.slot_count
        brought = context("brings", keys("A"))
        engine.on_new_request(brought)
        engine.complete_store(engine.prepare_store(keys("A"), brought).keys_to_store, brought)
        engine.on_request_finished(brought)
        user = context("uses", keys("ABC"))
        engine.on_new_request(user)
        engine.complete_store(engine.prepare_store(keys("BC"), user).keys_to_store, user)
        others = [make_offload_key(b"%032d" % n, 0) for n in range(slots - 2)]
        other = context("others", others)
        engine.on_new_request(other)
        evicted = engine.prepare_store(others, other).evicted_keys
        assert evicted == keys("C")
