"""Tracks the state of each region, by a table, and picks the next one. Touches no file.

Purpose of the machine: space on the disk is reused by region and not by block, so that writes are
long, blocks need not be freed one by one, and one header page turns a whole region into another
incarnation, in which no earlier block is found.

Coupling with others: the index (``disk/log/index.py``) has the blocks of a region, and knows when
the last one is gone; loads and stores are a region's readers and writers, and a region is opened
again only after a grace period, in which loads that had looked a block up there end; recovery
(``disk/folder/recovery.py``) decides what a region is when the folder is opened.

Blocks are appended to the one open region. The next ones get their headers ahead,
so that no store waits for that. When hardly any free one is left, the sealed
region with the fewest blocks is reclaimed: its blocks are reinserted, as far
as the budget allows, and the rest is dropped. One free region is kept
back for them, so a reclaim never waits for room.

# Invariant: a region is opened only when it has no block, no reader and no writer. Checked:
#            write_header, _open_next, the_index_and_the_regions_hold_their_own_invariants.
# Invariant: a slot is allocated once each time its region is opened. Checked: allocate, written,
#            no_wrong_block_leaves_the_log_and_no_byte_is_written_while_it_is_read.
# Invariant: bytes written in all <= WRITE_AMPLIFICATION_MAX x bytes of blocks stored,
#            unless the tables alone take more. Checked: _choose,
#            blocks_are_reinserted_only_as_far_as_the_budget_goes.
"""

from __future__ import annotations

from collections import deque
from enum import IntEnum
from typing import TYPE_CHECKING, Final, NamedTuple

from kvtier.errors import InternalError
from kvtier_backends.disk.format import NO_KEY_ID

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Mapping

WRITE_AMPLIFICATION_MAX: Final = 1.3
KEPT_BACK_REGIONS: Final = 1
"""This many free regions are reserved for reinserted blocks."""

AHEAD_BYTES: Final = 256 << 20
"""Regions of this many bytes get their headers ahead: as much as a fast disk writes in the time
that it takes for a header, which waits there behind all other writes."""

AHEAD_MAX: Final = 8
AHEAD_OF: Final = 4  #: in a small folder, at most one region of this many is opened ahead

CREDIT_OF: Final = 4
"""Credit is kept for reinserting one region of this many: what filling the folder once earns.

A folder of long conversations needs most of it when they begin to be evicted: each region then
still has most of its blocks. Every block that is dropped then makes those behind it useless.
"""

CREDIT_REGIONS_MIN: Final = 2


class RegionState(IntEnum):
    """The state of a region."""

    FREE = 0  #: has no block; may be opened
    NEXT = 1  #: has its new header; takes blocks when the open one is filled
    OPEN = 2  #: takes blocks
    SEALED = 3  #: takes no more; its last writers may still be at work
    RECLAIMING = 4  #: its blocks are reinserted elsewhere, or it waits for its last reader
    RETIRED = 5  #: its medium failed, or gave no room


class RegionEvent(IntEnum):
    """An event that changes a region's state."""

    HEADED = 0  #: its new header is written
    OPENED = 1
    FILLED = 2  #: its slots or its table pages are used up
    RECOVERED = 3  #: found with blocks in it when the folder was opened
    CHOSEN = 4  #: to be reclaimed
    RECLAIMED = 5  #: its last block and its last reader have gone
    FAILED = 6
    REVIVED = 7  #: to be tried again
    KEPT = 8  #: its blocks could not be reinserted: they stay


REGION_TABLE: Final[Mapping[tuple[RegionState, RegionEvent], RegionState]] = {
    (RegionState.FREE, RegionEvent.HEADED): RegionState.NEXT,
    (RegionState.NEXT, RegionEvent.OPENED): RegionState.OPEN,
    (RegionState.FREE, RegionEvent.RECOVERED): RegionState.SEALED,
    (RegionState.OPEN, RegionEvent.FILLED): RegionState.SEALED,
    (RegionState.SEALED, RegionEvent.CHOSEN): RegionState.RECLAIMING,
    (RegionState.RECLAIMING, RegionEvent.RECLAIMED): RegionState.FREE,
    (RegionState.RECLAIMING, RegionEvent.KEPT): RegionState.SEALED,
    (RegionState.FREE, RegionEvent.FAILED): RegionState.RETIRED,
    (RegionState.NEXT, RegionEvent.FAILED): RegionState.RETIRED,
    (RegionState.OPEN, RegionEvent.FAILED): RegionState.RETIRED,
    (RegionState.SEALED, RegionEvent.FAILED): RegionState.RETIRED,
    (RegionState.RECLAIMING, RegionEvent.FAILED): RegionState.RETIRED,
    (RegionState.RETIRED, RegionEvent.REVIVED): RegionState.FREE,
}


class Extent(NamedTuple):
    """Neighbouring slots of one region, allocated for one write."""

    region: int
    first: int
    slots: int


class Budget:
    """Limits the bytes that may be reinserted, so that write amplification stays bounded.

    Credit is capped at ``credit_bytes_max``: stores in order, however many, pay for no more.
    """

    def __init__(self, credit_bytes_max: int) -> None:
        self._credit_max = credit_bytes_max
        self._credit = 0.0

    def earn(self, block_bytes: int) -> None:
        """Count new blocks that were stored: they earn credit."""
        earned = block_bytes * (WRITE_AMPLIFICATION_MAX - 1)
        self._credit = min(self._credit + earned, self._credit_max)

    def spend(self, written_bytes: int) -> None:
        """Count everything else that was written: tables, headers, reinserted blocks."""
        self._credit -= written_bytes

    def affords(self, block_bytes: int, overhead_bytes: int) -> int:
        """Return how many blocks may be reinserted now, with that much written besides."""
        return max(0, int(self._credit - overhead_bytes) // block_bytes)


def regions_ahead(count: int, region_bytes: int) -> int:
    """Return how many regions of a folder with ``count`` of them get their headers ahead."""
    return max(1, min(AHEAD_MAX, count // AHEAD_OF, AHEAD_BYTES // region_bytes))


def credit_bytes_max(count: int, region_bytes: int) -> int:
    """Return the credit that a folder with ``count`` regions may save up; see ``Budget``."""
    return max(CREDIT_REGIONS_MIN, count // CREDIT_OF) * region_bytes


class Regions:
    """The regions of a folder. ``live`` returns how many blocks of a region are in the index."""

    def __init__(
        self, count: int, slots: int, live: Callable[[int], int], *, ahead_max: int = 1
    ) -> None:
        """``ahead_max``: how many regions may have their headers before they take blocks."""
        self.slots = slots
        self._ahead_max = ahead_max
        self._live = live
        self._states = [RegionState.FREE] * count
        self._sequences = [0] * count
        self._readers = [0] * count
        self._grace_periods = [0] * count  # how often the last reader has ended
        self._writers = [0] * count
        self._key_ids = [NO_KEY_ID] * count
        self._allocated: set[int] = set()
        self._free: deque[int] = deque(range(count))
        self._open: int | None = None
        self._next: deque[int] = deque()  # the first is OPEN as soon as no other is
        self._used = 0  # slots of the open region that are allocated
        self._opened = 0  # how often a region was opened
        self._sequence = 0

    # --- state ---

    @property
    def count(self) -> int:
        """How many regions there are."""
        return len(self._states)

    def state(self, region: int) -> RegionState:
        """Return the region's state."""
        return self._states[region]

    def sequence(self, region: int) -> int:
        """Return the sequence of the region's last opening, a number that only grows."""
        return self._sequences[region]

    @property
    def open_region(self) -> int | None:
        """The region that takes blocks now."""
        return self._open

    @property
    def room(self) -> int:
        """Number of slots left in the open region."""
        return 0 if self._open is None else self.slots - self._used

    @property
    def has_next(self) -> bool:
        """Whether a region takes blocks as soon as the open one is filled."""
        return bool(self._next)

    @property
    def next_count(self) -> int:
        """How many regions take blocks, one after the other, when the open one is filled."""
        return len(self._next)

    @property
    def ahead_missing(self) -> int:
        """How many more regions may get their headers ahead.

        No more than were opened so far: a folder may hold blocks that others, or this engine
        after a restart, could still use, and a new header discards them.
        """
        return max(1, min(self._ahead_max, self._opened)) - len(self._next)

    @property
    def free_count(self) -> int:
        """How many regions could be opened."""
        return len(self._free)

    def free(self) -> list[int]:
        """Return the regions that could be opened, the next one first."""
        return list(self._free)

    def count_in(self, state: RegionState) -> int:
        """Return how many regions are in a state."""
        return self._states.count(state)

    def oldest_first(self) -> list[int]:
        """Return the regions that may have blocks, in the order they were opened."""
        holding = (RegionState.OPEN, RegionState.SEALED, RegionState.RECLAIMING)
        found = [region for region, state in enumerate(self._states) if state in holding]
        return sorted(found, key=self._sequences.__getitem__)

    # --- recovery ---

    def recover(
        self,
        sequences: Mapping[int, int],
        reuse_last: Iterable[int],
        highest: int,
        key_ids: Mapping[int, bytes],
    ) -> None:
        """Restore a found state: regions with blocks, and those to open after all others.

        ``sequences`` and ``key_ids`` are those of the regions with blocks. ``highest`` is
        the greatest sequence number seen in the folder.
        """
        for region, key_id in key_ids.items():
            self._key_ids[region] = key_id
        for region, sequence in sequences.items():
            self._move(region, RegionEvent.RECOVERED)
            self._sequences[region] = sequence
        last = dict.fromkeys(reuse_last)
        first = [r for r in self._free if r not in sequences and r not in last]
        self._free = deque([*first, *(r for r in last if r not in sequences)])
        self._sequence = max(self._sequence, highest, *sequences.values(), 0)

    # --- allocating slots ---

    def next_to_open(self, *, for_reinsertion: bool) -> int | None:
        """Return the free region to open next, for new blocks or for reinserted ones."""
        kept_back = 0 if for_reinsertion else KEPT_BACK_REGIONS
        return self._free[0] if len(self._free) > kept_back else None

    def next_to_open_ahead(self) -> list[int]:
        """Return the free regions that may get their headers ahead now, in their order."""
        count = min(self.ahead_missing, len(self._free) - KEPT_BACK_REGIONS)
        return [self._free[place] for place in range(count)]

    def next_sequence(self) -> int:
        """Return a number greater than any before, for the header of a region to be opened."""
        self._sequence += 1
        return self._sequence

    def headed(self, region: int, sequence: int, key_id: bytes = NO_KEY_ID) -> None:
        """Note that the region's new header is written; it takes blocks when the open one is full.

        ``key_id`` is the id of the key that its blocks are encrypted with.
        """
        if self.ahead_missing <= 0:
            raise InternalError(f"regions {list(self._next)} are next")
        if not self.is_at_rest(region):
            raise InternalError(f"region {region} is in use")
        self._move(region, RegionEvent.HEADED)
        self._free.remove(region)
        self._sequences[region] = sequence
        self._key_ids[region] = key_id
        self._next.append(region)
        self._open_next()

    def allocate(self, count: int) -> Extent:
        """Allocate up to ``count`` slots of the open region, at least one, to one writer."""
        region = self._open
        if region is None or count < 1:
            raise InternalError("no region is open, or no slot is wanted")
        extent = Extent(region, self._used, min(count, self.slots - self._used))
        self._used += extent.slots
        assert self._used <= self.slots, "more slots are allocated than there are"
        self._writers[region] += 1
        if self._used == self.slots:
            self.fill()
        return extent

    def fill(self) -> None:
        """Seal the open region, full or not; the next one takes its place, if there is one."""
        if self._open is not None:
            self._move(self._open, RegionEvent.FILLED)
            self._open = None
            self._open_next()

    def _open_next(self) -> None:
        if self._open is None and self._next:
            self._open = self._next.popleft()
            self._used = 0
            self._opened += 1
            assert self.is_at_rest(self._open), "a region is opened while it is in use"
            self._move(self._open, RegionEvent.OPENED)

    def written(self, extent: Extent) -> None:
        """Note that a writer has ended, successfully or not."""
        assert 0 <= extent.first < extent.first + extent.slots <= self.slots, extent
        self._writers[extent.region] -= 1
        assert self._writers[extent.region] >= 0, "a writer ended twice"

    def is_written(self, region: int) -> bool:
        """Return whether the region takes no more blocks and has no writer left."""
        takes_blocks = self._states[region] in (RegionState.NEXT, RegionState.OPEN)
        return not (takes_blocks or self._writers[region])

    # --- readers ---

    def pin(self, region: int) -> None:
        """Count a reader: the region is not opened again before it ends."""
        self._readers[region] += 1

    def is_read(self, region: int) -> bool:
        """Return whether the region has a reader."""
        return self._readers[region] > 0

    def unpin(self, region: int) -> None:
        """End a reader. The region becomes free if it waited for that."""
        self._readers[region] -= 1
        assert self._readers[region] >= 0, "a reader ended twice"
        if not self._readers[region]:
            self._grace_periods[region] += 1
        if self._states[region] is RegionState.RECLAIMING:
            self.end_reclaim(region)

    def begin_grace_period(self, region: int) -> int:
        """Return a mark for ``is_grace_period_over``, of the readers that the region has now."""
        return self._grace_periods[region]

    def is_grace_period_over(self, region: int, mark: int) -> bool:
        """Return whether all readers that the region had when the mark was returned have ended.

        So it becomes true even if others have begun by then: under continuous loads.
        (As in read-copy-update: data that no new reader finds may go once the old ones ended.)
        """
        return not self._readers[region] or self._grace_periods[region] > mark

    # --- reclaiming ---

    def victim(self, exclude: Container[int] = ()) -> int | None:
        """Return the region to reclaim: fewest blocks, then without a reader, then the oldest."""
        sealed = (
            region
            for region, state in enumerate(self._states)
            if state is RegionState.SEALED and not self._writers[region] and region not in exclude
        )
        return min(
            sealed,
            key=lambda r: (self._live(r), self._readers[r] > 0, self._sequences[r]),
            default=None,
        )

    def begin_reclaim(self, region: int) -> None:
        """Begin to take a region out of use, block by block."""
        if self._writers[region]:
            raise InternalError(f"region {region} is being written")
        self._move(region, RegionEvent.CHOSEN)

    def end_reclaim(self, region: int) -> bool:
        """Free a region that is being reclaimed if it has no block and no reader left."""
        if self._live(region) or self._readers[region]:
            return False
        self._move(region, RegionEvent.RECLAIMED)
        self._free.appendleft(region)  # its bytes are allocated already
        return True

    def keep(self, region: int) -> None:
        """End the reclaim of a region that has blocks left: they stay where they are."""
        self._move(region, RegionEvent.KEPT)

    # --- disk space and encryption of a region ---

    def key_id(self, region: int) -> bytes:
        """Return the id of the key that the region's blocks are encrypted with."""
        return self._key_ids[region]

    def is_allocated(self, region: int) -> bool:
        """Return whether the region's bytes exist: it needs no more room on the disk."""
        return region in self._allocated

    def note_allocated(self, region: int) -> None:
        """Note that the region's bytes exist."""
        self._allocated.add(region)

    def forget_allocation(self, region: int) -> None:
        """Note that the region may have holes: its bytes must be allocated again."""
        self._allocated.discard(region)

    # --- faults ---

    def retire(self, region: int) -> bool:
        """Retire a region, permanently or until it is revived. Return False if it already was."""
        if self._states[region] is RegionState.RETIRED:
            return False
        if self._states[region] is RegionState.FREE:
            self._free.remove(region)
        if region in self._next:
            self._next.remove(region)
        self._move(region, RegionEvent.FAILED)
        if self._open == region:
            self._open = None
            self._open_next()
        return True

    def retire_unallocated(self) -> list[int]:
        """Retire all free regions that would need room on the disk; return them."""
        retired = [region for region in self._free if region not in self._allocated]
        self._free = deque(region for region in self._free if region in self._allocated)
        for region in retired:
            self._move(region, RegionEvent.FAILED)
        return retired

    def use_last(self, region: int) -> None:
        """Have a free region opened after all others."""
        self._free.remove(region)
        self._free.append(region)

    def is_at_rest(self, region: int) -> bool:
        """Return whether the region has no block, no reader and no writer."""
        return not (self._live(region) or self._readers[region] or self._writers[region])

    def assert_invariants(self) -> None:
        """Assert that the free, next and open regions match the states. Checks all regions."""
        by_state: dict[RegionState, list[int]] = {state: [] for state in RegionState}
        for number, its_state in enumerate(self._states):
            by_state[its_state].append(number)
        assert sorted(self._free) == by_state[RegionState.FREE], "the free ones"
        assert by_state[RegionState.OPEN] == ([] if self._open is None else [self._open])
        assert by_state[RegionState.NEXT] == sorted(self._next), "the next ones"
        assert len(self._next) <= self._ahead_max, "more are next than may be"
        waiting = by_state[RegionState.FREE] + by_state[RegionState.NEXT]
        assert all(map(self.is_at_rest, waiting)), "a region that waits to be opened is in use"

    def revive(self, region: int) -> bool:
        """Give a retired region another try, unless something still holds it."""
        if not self.is_at_rest(region) or self._states[region] is not RegionState.RETIRED:
            return False
        self._move(region, RegionEvent.REVIVED)
        self._free.append(region)
        return True

    def _move(self, region: int, event: RegionEvent) -> None:
        state = self._states[region]
        if (state, event) not in REGION_TABLE:
            raise InternalError(f"region {region}, {state.name}, cannot be {event.name}")
        self._states[region] = REGION_TABLE[state, event]
