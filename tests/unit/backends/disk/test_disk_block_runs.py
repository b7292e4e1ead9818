from __future__ import annotations

from hypothesis import given, strategies

from kvtier_backends.disk.log.index import BlockIndex, BlockRecord
from kvtier_backends.disk.log.reader import neighbours, stored_together

SLOTS = 4


def test_neighbours_in_any_order_are_one_run() -> None:
    assert neighbours([9, 2, 8, 1, 10], SLOTS) == [[3, 1], [2, 0, 4]]


def test_a_run_ends_with_its_region() -> None:
    assert neighbours([2, 3, 4, 5], SLOTS) == [[0, 1], [2, 3]]


@given(locations=strategies.lists(strategies.integers(0, 40), unique=True))
def test_each_place_is_in_one_run_and_runs_are_as_long_as_can_be(locations: list[int]) -> None:
    runs = neighbours(locations, SLOTS)
    assert sorted(place for run in runs for place in run) == list(range(len(locations)))
    for run in runs:
        found = [locations[place] for place in run]
        assert found == list(range(found[0], found[0] + len(found)))
        assert found[0] // SLOTS == found[-1] // SLOTS
        assert found[0] % SLOTS == 0 or found[0] - 1 not in locations


def test_blocks_of_one_second_are_a_batch_and_older_regions_come_first() -> None:
    index = BlockIndex(3, SLOTS)
    for location, stored_s in ((0, 7), (1, 7), (2, 8), (8, 5), (10, 5), (11, 6)):
        index.insert(bytes([location]), location, BlockRecord(bytes(16), stored_s, 9, b""))
    assert list(stored_together(index, [2, 1, 0])) == [
        [b"\x08", b"\x0a"],
        [b"\x0b"],
        [b"\x00", b"\x01"],
        [b"\x02"],
    ]
