"""The longest prefix across groups, beside the obvious way to find it; where stores are cut."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies

from kvtier.core.messages import GroupKeys
from kvtier.engine.primary.prefix_reservations import Unknown, longest_prefix, storable

COSTS = strategies.lists(strategies.sampled_from([0, 0, 1, 1, 1, None]), max_size=8)


def group(number: int, chunk: int, costs: list[int | None], window: int | None) -> GroupKeys:
    keys = tuple(bytes([number, index]) for index in range(len(costs)))
    return GroupKeys(keys, tuple(chunk * (index + 1) for index in range(len(costs))), window)


@given(
    first=COSTS,
    second=COSTS,
    chunk=strategies.sampled_from([1, 2, 3]),
    window=strategies.sampled_from([None, 1, 2]),
    room=strategies.integers(0, 12),
)
def test_it_is_the_longest_that_fits(
    first: list[int | None],
    second: list[int | None],
    chunk: int,
    window: int | None,
    room: int,
) -> None:
    """All blocks of a whole prefix, the last ones of a window, up to one token."""
    groups = [group(0, 1, first, None), group(1, chunk, second, window)]
    costs = {
        key: cost
        for each, of in zip(groups, (first, second), strict=True)
        for key, cost in zip(each.keys, of, strict=True)
    }
    best = 0
    for tokens in range(1, min(len(first), chunk * len(second)) + 1):
        last = -(-tokens // chunk)
        begin = 0 if window is None else max(0, last - window)
        needed = [*first[:tokens], *second[begin:last]]
        if None not in needed and sum(each or 0 for each in needed) <= room:
            best = tokens
    found = longest_prefix(groups, costs.__getitem__, room)
    assert (found.tokens if found else 0) == best
    if found:
        ends = {key: end for each in groups for key, end in zip(each.keys, each.ends, strict=True)}
        assert [ends[key] for key in found.keys] == sorted(ends[key] for key in found.keys)
        assert sum(costs[key] or 0 for key in found.keys) <= room


@given(
    count=strategies.integers(1, 12),
    chunk=strategies.integers(1, 5),
    reach=strategies.integers(0, 20),
    beyond=strategies.sampled_from([0, 1]),
    tokens=strategies.integers(1, 60),
)
def test_a_window_needs_the_blocks_of_its_tokens_and_a_draft_one_behind_them(
    count: int, chunk: int, reach: int, beyond: int, tokens: int
) -> None:
    window = max(1, -(-reach // chunk))
    ends = tuple(chunk * (number + 1) for number in range(count))
    keys = tuple(bytes([number]) for number in range(count))
    needed = GroupKeys(keys, ends, window, reach, beyond).needed(tokens)
    last = (tokens - 1) // chunk  # of the prefix
    if last + beyond >= count:
        assert needed is None
        return
    wanted = {max(0, token) // chunk for token in range(tokens - reach, tokens)} | {last}
    wanted |= {number for number in range(last + 1 - window, last + 1) if number >= 0}
    wanted |= set(range(last + 1, last + 1 + beyond))
    assert needed == tuple(keys[number] for number in sorted(wanted))


def test_a_block_that_is_asked_for_is_waited_for() -> None:
    def cost(_: bytes) -> int:
        raise Unknown

    with pytest.raises(Unknown):
        longest_prefix([group(0, 1, [1], None)], cost, 1)


def test_no_group_and_no_key_have_no_prefix() -> None:
    assert longest_prefix([], lambda _: 0, 9) is None
    assert longest_prefix([group(0, 1, [0], None), group(1, 1, [], None)], lambda _: 0, 9) is None


@pytest.mark.parametrize(("room", "stored"), [(9, 6), (6, 6), (5, 4), (4, 4), (3, 0), (0, 0)])
def test_a_store_is_cut_where_it_may_be(room: int, stored: int) -> None:
    keys = [bytes([number]) for number in range(6)]
    assert storable(keys, keys, (4, 6), room) == stored
    assert storable(keys, keys, None, room) == min(room, 6)


def test_what_is_here_already_takes_no_room() -> None:
    keys = [bytes([number]) for number in range(6)]
    assert storable(keys[2:], keys, (4, 6), 2) == 2
    assert storable(keys[5:], keys, (4, 6), 0) == 0
