"""The reuse policy's cost, as the lines of Python that it executes: never as seconds.

What a request has in common with earlier ones may be thousands of blocks. They must pass through C
in one go, as they do in ``lru``.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest

from kvtier.policies.eviction.reuse.model import AGE_BINS, ReuseModel
from kvtier.policies.eviction.reuse.policy import ReusePolicy

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

CAPACITY = 1_000_000
"""So large that the floor looks at a 256th of the blocks."""

SHORT, LONG = 512, 8 * 512

Case = tuple[list[bytes], list[list[bytes]]] | tuple[list[bytes], list[list[bytes]], int]


def blocks(number: int, name: str = "shared") -> list[bytes]:
    """Return keys whose last bytes are spread as those of hashes are."""
    return [
        f"{name} {block}".encode().rjust(30) + (block * 40503 % 65536).to_bytes(2) + bytes(4)
        for block in range(number)
    ]


def lines_of(call: Callable[[], object]) -> int:
    """Return how many lines of Python are executed; a loop counts in each round."""
    count = 0

    def trace(_frame: FrameType, event: str, _argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def serve(policy: ReusePolicy, keys: list[bytes], request: str) -> None:
    """Let a request find what is resident, store the rest, and end."""
    found = [key for key in keys if key in policy]
    policy.touch(found, request)
    policy.admit(keys[len(found) :], request, held=False)
    policy.end_request(request, keys)


def cost_of_the_next(keys: list[bytes], earlier: list[list[bytes]], evicted: int = 0) -> int:
    """Return the lines that a request takes, after earlier ones and so many evicted blocks."""
    policy = ReusePolicy(CAPACITY)
    for number, each in enumerate(earlier):
        policy.pass_time(float(number))
        serve(policy, each, f"{number}")
    policy.choose_victims(evicted, frozenset())
    found = [key for key in keys if key in policy]

    def request() -> None:
        policy.touch(found, "next")
        policy.admit(keys[len(found) :], "next", held=False)
        policy.end_request("next", keys)

    return lines_of(request)


def again(number: int) -> Case:
    """The same prompt once more."""
    return blocks(number), [blocks(number)]


def next_turn(number: int) -> Case:
    """A conversation's third turn."""
    turns = [blocks(number) + blocks(more, "turn") for more in (0, 4, 8)]
    return turns[-1], turns[:-1]


def branches(number: int) -> Case:
    """Agents that leave one context midway, and return."""
    agents = [
        blocks(left_at) + blocks(3, f"{left_at}") for left_at in range(number, number // 2, -64)
    ]
    agents = [agents[0], agents[len(agents) // 2], agents[-1]]
    return agents[1], [*agents, *agents]


def lost_its_tail(number: int) -> Case:
    """The same prompt, of which a few blocks were evicted."""
    return blocks(number), [blocks(number)], 5


def nothing_found(number: int) -> Case:
    """A new prompt: its blocks are brought, at one line a block or two."""
    return blocks(number), []


@pytest.mark.parametrize("case", [again, next_turn, branches, lost_its_tail])
def test_a_request_costs_by_its_nodes_and_not_by_the_blocks_it_shares(
    case: Callable[[int], Case],
) -> None:
    short, long = cost_of_the_next(*case(SHORT)), cost_of_the_next(*case(LONG))
    assert long < short + (LONG - SHORT) / 8, "less than a line for eight blocks"


def test_new_blocks_cost_a_few_lines_each() -> None:
    short, long = (cost_of_the_next(*nothing_found(number)) for number in (SHORT, LONG))
    assert long - short < 4 * (LONG - SHORT)


def test_evicted_blocks_that_return_cost_a_few_lines_each() -> None:
    """They leave a ghost for each node, which are met one after the other."""

    def cost(number: int) -> int:
        policy = ReusePolicy(CAPACITY)
        for number_of_parts in range(1, 9):
            serve(policy, blocks(number * number_of_parts // 8), f"{number_of_parts}")
        policy.choose_victims(len(policy), frozenset())
        policy.admit(blocks(number), "next", held=False)
        return lines_of(lambda: policy.end_request("next", blocks(number)))

    assert cost(LONG) - cost(SHORT) < 8 * (LONG - SHORT)


def test_indices_are_computed_of_the_cohorts_in_use_only() -> None:
    model = ReuseModel()
    model.enter(5)
    model.refresh(10.0)
    model.index_of(5, 0.0)
    model.index_of(7, 1.0)
    assert {at // AGE_BINS for at in model._index} == {5, 7}
