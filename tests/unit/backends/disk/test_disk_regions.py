from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, strategies
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvtier.errors import InternalError
from kvtier_backends.disk.log.index import BlockIndex, BlockRecord
from kvtier_backends.disk.log.regions import (
    AHEAD_MAX,
    REGION_TABLE,
    WRITE_AMPLIFICATION_MAX,
    Budget,
    Extent,
    RegionEvent,
    Regions,
    RegionState,
    regions_ahead,
)

REGIONS, SLOTS, AHEAD = 5, 4, 2
NOTHING = BlockRecord(bytes(16), 0, 0, b"")


class RegionsSpec(RuleBasedStateMachine):
    """The model is the disk itself: what was last written to each slot, and by whom."""

    def __init__(self) -> None:
        super().__init__()
        self.index = BlockIndex(REGIONS, SLOTS)
        self.regions = Regions(REGIONS, SLOTS, self.index.live, ahead_max=AHEAD)
        self.disk: dict[tuple[int, int], bytes] = {}
        self.writing: list[tuple[Extent, list[bytes]]] = []
        self.readers: list[tuple[int, int, bytes]] = []
        self.begun = 0  # readers so far, and the number of each one that reads
        self.reading: list[int] = []
        self.noted: list[tuple[int, int, set[int]]] = []
        self.live: dict[bytes, tuple[int, int]] = {}
        self.keys = iter(number.to_bytes(4, "big") for number in range(1 << 30))

    def open(self, *, for_reinsertion: bool) -> bool:
        region = self.regions.next_to_open(for_reinsertion=for_reinsertion)
        if region is None:
            return False
        assert not any(at[0] == region for at in self.live.values())
        assert not any(reader[0] == region for reader in self.readers)
        assert not any(extent.region == region for extent, _ in self.writing)
        self.regions.headed(region, self.regions.next_sequence())
        self.disk = {at: key for at, key in self.disk.items() if at[0] != region}
        return True

    def write(self, keys: list[bytes], *, for_reinsertion: bool) -> list[bytes]:
        """Write as many as there is room for; returns the rest."""
        while keys and (self.regions.room or self.open(for_reinsertion=for_reinsertion)):
            extent = self.regions.allocate(len(keys))
            here, keys = keys[: extent.slots], keys[extent.slots :]
            for slot, key in enumerate(here, extent.first):
                assert 0 <= slot < SLOTS
                assert (extent.region, slot) not in self.disk, "handed out twice"
                self.disk[extent.region, slot] = key
            self.writing.append((extent, here))
        return keys

    def end_write(self, place: int, *, well: bool) -> None:
        extent, keys = self.writing.pop(place)
        self.regions.written(extent)
        if well and self.regions.state(extent.region) is not RegionState.RETIRED:
            for slot, key in enumerate(keys, extent.first):
                self.index.insert(key, extent.region * SLOTS + slot, NOTHING)
                self.live[key] = (extent.region, slot)

    @precondition(lambda self: self.regions.ahead_missing)
    @rule()
    def open_ahead(self) -> None:
        self.open(for_reinsertion=False)

    @rule(count=strategies.integers(1, 7))
    def store(self, count: int) -> None:
        rest = self.write([next(self.keys) for _ in range(count)], for_reinsertion=False)
        assert not rest or self.regions.free_count <= 1

    @precondition(lambda self: self.writing)
    @rule(data=strategies.data(), well=strategies.booleans())
    def a_write_ends(self, data: strategies.DataObject, well: bool) -> None:
        self.end_write(data.draw(strategies.integers(0, len(self.writing) - 1)), well=well)

    @precondition(lambda self: self.live)
    @rule(data=strategies.data())
    def remove(self, data: strategies.DataObject) -> None:
        key = data.draw(strategies.sampled_from(sorted(self.live)))
        self.index.remove(key)
        del self.live[key]

    @precondition(lambda self: self.live)
    @rule(data=strategies.data())
    def begin_to_read(self, data: strategies.DataObject) -> None:
        key = data.draw(strategies.sampled_from(sorted(self.live)))
        self.regions.pin(self.live[key][0])
        self.readers.append((*self.live[key], key))
        self.begun += 1
        self.reading.append(self.begun)

    @precondition(lambda self: self.readers)
    @rule(data=strategies.data())
    def end_to_read(self, data: strategies.DataObject) -> None:
        place = data.draw(strategies.integers(0, len(self.readers) - 1))
        region, slot, key = self.readers.pop(place)
        del self.reading[place]
        assert self.disk[region, slot] == key
        self.regions.unpin(region)

    @precondition(lambda self: self.readers)
    @rule(data=strategies.data())
    def note_who_reads(self, data: strategies.DataObject) -> None:
        region = data.draw(strategies.sampled_from(sorted({reader[0] for reader in self.readers})))
        mark = self.regions.begin_grace_period(region)
        self.noted.append((region, mark, set(self.readers_of(region))))

    def readers_of(self, region: int) -> list[int]:
        pairs = zip(self.readers, self.reading, strict=True)
        return [number for reader, number in pairs if reader[0] == region]

    @rule(budget=strategies.integers(0, SLOTS))
    def empty_one(self, budget: int) -> None:
        region = self.regions.victim()
        if region is None:
            return
        fewest = min(
            self.index.live(other)
            for other in range(REGIONS)
            if self.regions.state(other) is RegionState.SEALED
            and not any(extent.region == other for extent, _ in self.writing)
        )
        assert self.index.live(region) == fewest
        self.regions.begin_reclaim(region)
        moved = [key for key, at in self.live.items() if at[0] == region]
        for key in moved:
            self.index.remove(key)
            del self.live[key]
        self.write(moved[:budget], for_reinsertion=True)
        free = self.regions.end_reclaim(region)
        assert free is not any(reader[0] == region for reader in self.readers)

    @rule(region=strategies.integers(0, REGIONS - 1))
    def retire(self, region: int) -> None:
        for key in [key for key, at in self.live.items() if at[0] == region]:
            self.index.remove(key)
            del self.live[key]
        was = self.regions.state(region)
        assert self.regions.retire(region) is (was is not RegionState.RETIRED)

    @rule(region=strategies.integers(0, REGIONS - 1))
    def revive(self, region: int) -> None:
        self.regions.revive(region)

    @invariant()
    def every_live_block_is_found_where_it_was_put(self) -> None:
        for key, (region, slot) in self.live.items():
            assert self.index.get(key) == region * SLOTS + slot
            assert self.disk[region, slot] == key

    @invariant()
    def no_reader_sees_its_slot_written(self) -> None:
        for region, slot, key in self.readers:
            assert self.disk[region, slot] == key

    @invariant()
    def a_grace_period_is_over_once_all_who_read_the_region_then_have_ended(self) -> None:
        for region, mark, noted in self.noted:
            reading = self.readers_of(region)
            if self.regions.is_grace_period_over(region, mark):
                assert noted.isdisjoint(reading)
            else:
                assert reading

    @invariant()
    def every_region_is_in_one_state_and_at_most_one_is_open(self) -> None:
        states = Counter(self.regions.state(region) for region in range(REGIONS))
        assert states[RegionState.OPEN] == (self.regions.open_region is not None)
        assert states[RegionState.NEXT] == self.regions.next_count <= AHEAD
        assert self.regions.has_next == (self.regions.next_count > 0)
        assert self.regions.open_region is not None or not self.regions.has_next
        assert states[RegionState.FREE] == self.regions.free_count
        assert all(self.regions.count_in(state) == states[state] for state in RegionState)


TestRegionsSpec = RegionsSpec.TestCase


def make(live: dict[int, int] | None = None) -> Regions:
    counts = {} if live is None else live
    return Regions(REGIONS, SLOTS, lambda region: counts.get(region, 0))


def fill(regions: Regions, count: int) -> None:
    for _ in range(count):
        region = regions.next_to_open(for_reinsertion=True)
        assert region is not None
        regions.headed(region, regions.next_sequence())
        regions.written(regions.allocate(SLOTS))


def test_regions_ahead_take_blocks_in_the_order_of_their_headers() -> None:
    regions = Regions(REGIONS, SLOTS, lambda _: 0, ahead_max=AHEAD)
    assert regions.next_to_open_ahead() == [0], "no more than were opened before"
    for region in (0, 1):  # 0 is open at once
        regions.headed(region, regions.next_sequence())
    assert regions.next_to_open_ahead() == []
    assert regions.allocate(SLOTS).region == 0
    assert regions.next_to_open_ahead() == [2, 3]
    for region in (2, 3):
        regions.headed(region, regions.next_sequence())
    assert (regions.open_region, regions.next_count, regions.ahead_missing) == (1, 2, 0)
    with pytest.raises(InternalError):
        regions.headed(4, regions.next_sequence())
    assert [regions.allocate(SLOTS).region for _ in range(3)] == [1, 2, 3]


def test_a_region_ahead_that_fails_is_left_out() -> None:
    regions = Regions(REGIONS, SLOTS, lambda _: 0, ahead_max=AHEAD)
    for region in (0, 1):
        regions.headed(region, regions.next_sequence())
    regions.allocate(SLOTS)
    for region in (2, 3):
        regions.headed(region, regions.next_sequence())
    assert regions.retire(2)
    assert [regions.allocate(SLOTS).region for _ in range(2)] == [1, 3]
    regions.assert_invariants()


def test_how_many_regions_are_opened_ahead() -> None:
    """What a disk writes meanwhile, and never much of a small folder."""
    mib = 1 << 20
    assert regions_ahead(1000, 64 * mib) == 4
    assert regions_ahead(1000, 1024 * mib) == 1
    assert regions_ahead(1000, mib) == AHEAD_MAX
    assert regions_ahead(8, 64 * mib) == 2
    assert regions_ahead(3, 64 * mib) == 1


def test_stores_leave_one_region_for_what_is_appended_again() -> None:
    regions = make()
    fill(regions, REGIONS - 1)
    assert regions.next_to_open(for_reinsertion=False) is None
    assert regions.next_to_open(for_reinsertion=True) is not None


def test_the_fewest_blocks_and_then_the_oldest_region_is_emptied() -> None:
    live: dict[int, int] = {}
    regions = make(live)
    fill(regions, 4)
    live.update({0: 2, 1: 1, 2: 1, 3: 4})
    assert regions.victim() == 1
    regions.pin(1)
    assert regions.victim() == 2, "a reclaim of 1 would have to wait"
    regions.unpin(1)
    live[1] = 3
    assert regions.victim() == 2


def test_a_region_with_a_writer_is_not_emptied() -> None:
    regions = make()
    regions.headed(0, 1)
    extent = regions.allocate(SLOTS)
    assert regions.state(0) is RegionState.SEALED
    assert regions.victim() is None
    with pytest.raises(InternalError):
        regions.begin_reclaim(0)
    regions.written(extent)
    assert regions.victim() == 0


def test_recovered_regions_are_sealed_and_foreign_ones_are_used_last() -> None:
    regions = make()
    regions.recover({2: 7, 0: 9}, reuse_last=[1], highest=12, key_ids={})
    assert regions.oldest_first() == [2, 0]
    assert regions.next_sequence() == 13
    assert [regions.next_to_open(for_reinsertion=False), regions.free_count] == [3, 3]
    fill(regions, 2)
    assert regions.next_to_open(for_reinsertion=True) == 1


@pytest.mark.parametrize("state", RegionState)
@pytest.mark.parametrize("event", RegionEvent)
def test_a_move_without_a_row_is_refused(state: RegionState, event: RegionEvent) -> None:
    regions = make()
    regions._states[0] = state
    if (state, event) in REGION_TABLE:
        regions._move(0, event)
        assert regions.state(0) is REGION_TABLE[state, event]
    else:
        with pytest.raises(InternalError):
            regions._move(0, event)


@given(
    strategies.lists(
        strategies.tuples(
            strategies.integers(1, 20), strategies.integers(0, 3), strategies.integers(0, 30)
        ),
        max_size=60,
    ),
    strategies.integers(1, 1000),
)
def test_write_amplification_stays_bounded_at_every_moment(
    steps: list[tuple[int, int, int]], credit_max: int
) -> None:
    """Whatever is asked for, what is afforded keeps the bound, tables included."""
    budget = Budget(credit_max)
    stored = overhead = again = 0
    for blocks, table, wish in steps:
        budget.earn(blocks * 10)
        budget.spend(table)
        stored += blocks * 10
        overhead += table
        count = min(wish, budget.affords(10, overhead_bytes=1))
        assert count * 10 <= credit_max
        if count:
            budget.spend(count * 10 + 1)
            again += count * 10 + 1
            assert stored + overhead + again <= WRITE_AMPLIFICATION_MAX * stored + 1e-6
