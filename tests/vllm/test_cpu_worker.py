"""The CPU platform's worker against a model that copies one byte at a time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings, strategies
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    CanonicalPageMapping,
    CopyRun,
    GPULoadStoreSpec,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from kvtier.errors import InternalError
from kvtier.vllm.memory.cpu_worker import CPUPlatformWorker
from kvtier.vllm.memory.pages import HostLayout

if TYPE_CHECKING:
    from collections.abc import Iterator

UNTOUCHED = 0xEE
PROPERTY = settings(max_examples=60)


@dataclass
class Shape:
    """One engine's geometry, small enough for loops over bytes."""

    blocks: int
    slots: int
    per_slot: int
    ranks: int
    pages: list[int]  # page bytes of each tensor
    gaps: list[int]  # bytes between two pages of each tensor
    groups: list[list[tuple[int, int]]]  # (tensor, bytes used of its page) of each layer
    tail: int  # padding at the end of a row

    @property
    def rank_bytes(self) -> int:
        return sum(self.pages) * self.per_slot

    @property
    def row_bytes(self) -> int:
        return self.rank_bytes * self.ranks + self.tail

    def layout(self, rank: int) -> HostLayout:
        return HostLayout(
            self.slots, self.row_bytes, self.per_slot, rank * self.rank_bytes, self.rank_bytes
        )


@dataclass
class Transfer:
    """What the connector would ask for: blocks of each group, and the slots."""

    blocks: list[list[int]] = field(default_factory=list)
    firsts: list[int] = field(default_factory=list)
    slots: list[list[int]] = field(default_factory=list)

    def engine_spec(self, blocks: list[list[int]] | None = None) -> GPULoadStoreSpec:
        chosen = self.blocks if blocks is None else blocks
        return GPULoadStoreSpec(
            [block for group in chosen for block in group],
            group_sizes=[len(group) for group in chosen],
            block_indices=self.firsts,
        )

    def host_spec(self) -> CPULoadStoreSpec:
        return CPULoadStoreSpec([slot for group in self.slots for slot in group])

    def places(self, per_slot: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield (group, position in it, slot, sub-block) of each block."""
        for group, (blocks, first) in enumerate(zip(self.blocks, self.firsts, strict=True)):
            for position in range(len(blocks)):
                place = first % per_slot + position
                yield group, position, self.slots[group][place // per_slot], place % per_slot


@strategies.composite
def shapes(draw: strategies.DrawFn) -> Shape:
    tensors = draw(strategies.integers(1, 3))
    pages = draw(strategies.lists(strategies.integers(1, 24), min_size=tensors, max_size=tensors))
    layer = strategies.integers(0, tensors - 1).flatmap(
        lambda tensor: strategies.tuples(
            strategies.just(tensor), strategies.integers(1, pages[tensor])
        )
    )
    return Shape(
        blocks=draw(strategies.integers(8, 14)),
        slots=draw(strategies.integers(8, 12)),
        per_slot=draw(strategies.integers(1, 4)),
        ranks=draw(strategies.integers(1, 3)),
        pages=pages,
        gaps=draw(
            strategies.lists(strategies.sampled_from([0, 0, 5]), min_size=tensors, max_size=tensors)
        ),
        groups=draw(
            strategies.lists(
                strategies.lists(layer, min_size=1, max_size=3, unique_by=lambda item: item[0]),
                min_size=1,
                max_size=3,
            )
        ),
        tail=draw(strategies.integers(0, 9)),
    )


@strategies.composite
def transfers(draw: strategies.DrawFn, shape: Shape) -> Transfer:
    transfer = Transfer()
    free_blocks = draw(strategies.permutations(range(shape.blocks)))
    free_slots = draw(strategies.permutations(range(shape.slots)))
    for _ in shape.groups:
        first = draw(strategies.integers(0, 9))
        size = draw(strategies.integers(0, min(5, len(free_blocks))))
        taken = -(-(first % shape.per_slot + size) // shape.per_slot) if size else 0
        if taken > len(free_slots):
            size = taken = 0
        transfer.blocks.append(list(free_blocks[:size]))
        transfer.slots.append(list(free_slots[:taken]))
        transfer.firsts.append(first)
        free_blocks, free_slots = free_blocks[size:], free_slots[taken:]
    return transfer


def engine_tensors(shape: Shape, seed: int) -> list[torch.Tensor]:
    """Make strided byte tensors with random content, gaps included."""
    generator = torch.Generator().manual_seed(seed)
    tensors = []
    for page, gap in zip(shape.pages, shape.gaps, strict=True):
        length = 3 + shape.blocks * (page + gap)
        memory = torch.randint(-128, 128, (length,), dtype=torch.int8, generator=generator)
        tensors.append(memory.as_strided((shape.blocks, page), (page + gap, 1), 3))
    return tensors


def kv_caches(shape: Shape, tensors: list[torch.Tensor]) -> CanonicalKVCaches:
    return CanonicalKVCaches(
        [
            CanonicalKVCacheTensor(tensor, page)
            for tensor, page in zip(tensors, shape.pages, strict=True)
        ],
        [[CanonicalKVCacheRef(*layer) for layer in group] for group in shape.groups],
    )


def memory_of(tensors: list[torch.Tensor]) -> list[bytes]:
    return [bytes(tensor.untyped_storage()) for tensor in tensors]


def model_store(
    shape: Shape, rank: int, tensors: list[torch.Tensor], region: bytearray, transfer: Transfer
) -> None:
    """Store byte by byte, straight from the description of the layout."""
    for group, position, slot, sub_block in transfer.places(shape.per_slot):
        block = transfer.blocks[group][position]
        for index, used in shape.groups[group]:
            at = slot * shape.row_bytes + rank * shape.rank_bytes
            at += sum(shape.pages[:index]) * shape.per_slot + sub_block * shape.pages[index]
            for byte in range(used):
                region[at + byte] = int(tensors[index][block, byte]) & 0xFF


@PROPERTY
@given(data=strategies.data())
def test_store_writes_what_the_byte_model_writes(data: strategies.DataObject) -> None:
    """All ranks store; every byte of the region, neighbours included, is as in the model."""
    shape = data.draw(shapes())
    transfer = data.draw(transfers(shape))
    region = bytearray([UNTOUCHED]) * (shape.slots * shape.row_bytes)
    expected = bytearray(region)
    for rank in range(shape.ranks):
        tensors = engine_tensors(shape, rank)
        worker = CPUPlatformWorker(
            kv_caches(shape, tensors), memoryview(region), shape.layout(rank)
        )
        assert worker.submit_store(7, transfer.engine_spec(), transfer.host_spec())
        model_store(shape, rank, tensors, expected, transfer)
    assert region == expected


@PROPERTY
@given(data=strategies.data())
def test_load_into_other_blocks_brings_the_stored_pages_and_nothing_else(
    data: strategies.DataObject,
) -> None:
    """What was stored from some blocks arrives in others; all else keeps its bytes."""
    shape = data.draw(shapes())
    transfer = data.draw(transfers(shape))
    others = data.draw(strategies.permutations(range(shape.blocks)))
    targets, at = [], 0
    for blocks in transfer.blocks:
        targets.append(list(others[at : at + len(blocks)]))
        at += len(blocks)
    region = bytearray(shape.slots * shape.row_bytes)
    source, target = engine_tensors(shape, 1), engine_tensors(shape, 2)
    expected = engine_tensors(shape, 2)
    for group, layers in enumerate(shape.groups):
        for block, other in zip(transfer.blocks[group], targets[group], strict=True):
            for index, used in layers:
                for byte in range(used):
                    expected[index][other, byte] = source[index][block, byte]
    rank = shape.ranks - 1
    writer = CPUPlatformWorker(kv_caches(shape, source), memoryview(region), shape.layout(rank))
    reader = CPUPlatformWorker(kv_caches(shape, target), memoryview(region), shape.layout(rank))
    writer.submit_store(1, transfer.engine_spec(), transfer.host_spec())
    reader.submit_load(2, transfer.host_spec(), transfer.engine_spec(targets), expedited=True)
    assert memory_of(target) == memory_of(expected)
    moved = sum(
        len(blocks) * used
        for blocks, layers in zip(transfer.blocks, shape.groups, strict=True)
        for _, used in layers
    )
    (result,) = reader.get_finished()
    assert (result.job_id, result.success, result.transfer_size) == (2, True, moved)
    assert reader.get_finished() == []


@PROPERTY
@given(
    heads=strategies.integers(1, 4),
    ranks=strategies.sampled_from([1, 2]),
    head_bytes=strategies.integers(1, 6),
    tokens=strategies.integers(1, 4),
    per_slot=strategies.integers(1, 3),
)
def test_canonical_rows_do_not_depend_on_the_number_of_ranks(
    heads: int, ranks: int, head_bytes: int, tokens: int, per_slot: int
) -> None:
    """Heads cut over two ranks land where one rank with all heads would put them."""
    total = heads * ranks
    page, local = total * tokens * head_bytes, heads * tokens * head_bytes
    generator = torch.Generator().manual_seed(heads)
    # (block, token, head, bytes): a rank's heads are strided within the canonical page.
    whole = torch.randint(
        -128, 128, (6, tokens, total, head_bytes), dtype=torch.int8, generator=generator
    )
    region = bytearray([UNTOUCHED]) * (4 * (page * per_slot + 3))
    layout = HostLayout(4, page * per_slot + 3, per_slot, 0, page * per_slot + 3)
    blocks, slots = [5, 0, 3], [2, 0, 1][: -(-3 // per_slot)]
    engine, host = GPULoadStoreSpec(blocks, [3], [0]), CPULoadStoreSpec(slots)
    parts = []
    for rank in range(ranks):
        part = whole[:, :, rank * heads : (rank + 1) * heads].contiguous().flatten(1)
        run = CopyRun(
            local_offset=0,
            canonical_offset=rank * heads * head_bytes,
            fragment_size=heads * head_bytes,
            num_fragments=tokens,
            local_stride=heads * head_bytes,
            canonical_stride=total * head_bytes,
        )
        parts.append((part, CanonicalPageMapping(page, local, (run,), 1, 0, True)))
    for part, mapping in parts:
        worker = CPUPlatformWorker(
            canonical_caches(part, mapping), memoryview(region), layout, canonical=True
        )
        worker.submit_store(1, engine, host)
    for position, block in enumerate(blocks):
        at = slots[position // per_slot] * layout.row_bytes + position % per_slot * page
        assert region[at : at + page] == whole[block].numpy().tobytes()
    for part, mapping in parts:
        target = torch.zeros_like(part)
        worker = CPUPlatformWorker(
            canonical_caches(target, mapping), memoryview(region), layout, canonical=True
        )
        worker.submit_load(2, host, engine)
        assert torch.equal(target[blocks], part[blocks])


def canonical_caches(tensor: torch.Tensor, mapping: CanonicalPageMapping) -> CanonicalKVCaches:
    size = tensor.shape[1]
    return CanonicalKVCaches(
        [CanonicalKVCacheTensor(tensor, size)], [[CanonicalKVCacheRef(0, size, mapping)]]
    )


def test_ranks_with_equal_bytes_take_turns_in_writing() -> None:
    """Each host page is written by one of the two ranks, all pages by somebody."""
    region = bytearray(6 * 8)
    layout = HostLayout(6, 8, 2, 0, 8)
    written = []
    for rank in range(2):
        tensor = torch.full((6, 4), rank + 1, dtype=torch.int8)
        mapping = CanonicalPageMapping(4, 4, (CopyRun(0, 0, 4, 1, 4, 4),), 2, rank, True)
        worker = CPUPlatformWorker(
            canonical_caches(tensor, mapping), memoryview(region), layout, canonical=True
        )
        worker.submit_store(1, GPULoadStoreSpec([0, 1, 2], [3], [1]), CPULoadStoreSpec([4, 2]))
        written.append(worker.get_finished()[0].transfer_size)
    assert [region[page * 4] for page in (8, 9, 4, 5)] == [0, 2, 1, 2]
    assert written == [4, 8]


def small_worker(**changes: Any) -> CPUPlatformWorker:
    tensor = torch.zeros((8, 16), dtype=torch.int8)
    caches = CanonicalKVCaches(
        [CanonicalKVCacheTensor(tensor, changes.pop("page", 16))], [[CanonicalKVCacheRef(0, 16)]]
    )
    layout = HostLayout(
        **{
            "slot_count": 4,
            "row_bytes": 32,
            "blocks_per_chunk": 2,
            "rank_offset": 0,
            "rank_bytes": 32,
            **changes,
        }
    )
    return CPUPlatformWorker(caches, memoryview(bytearray(4 * 32)), layout)


@pytest.mark.parametrize(
    ("blocks", "sizes", "firsts", "slots", "reason"),
    [
        ([1, 2, 3], [3], [0], [0], "take 2 slots of 2; 1 were given"),
        ([1, 2], [2], [0], [0, 1], "2 slots given, the groups take 1"),
        ([1, 2], [1, 1], [0, 0], [0, 1], "for 1 KV-cache groups"),
        ([1, 8], [2], [0], [0], "group 0 block 8 is outside 0..7"),
        ([1, -1], [2], [0], [0], "group 0 block -1 is outside"),
        ([1, 2], [2], [0], [4], "slot 4 is outside 0..3"),
    ],
)
def test_a_transfer_that_does_not_fit_is_refused_before_any_copy(
    blocks: list[int], sizes: list[int], firsts: list[int], slots: list[int], reason: str
) -> None:
    """A wrong id must never become a wrong copy: it would be served later."""
    worker = small_worker()
    with pytest.raises(InternalError, match=reason):
        worker.submit_store(3, GPULoadStoreSpec(blocks, sizes, firsts), CPULoadStoreSpec(slots))
    assert worker.get_finished() == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"page": 15}, "page_size_bytes says 15"),
        ({"rank_bytes": 31}, "this rank's part ends at 31"),
        ({"row_bytes": 31}, "the row at 31"),
    ],
)
def test_tensors_that_do_not_fit_the_row_are_refused(changes: dict[str, int], reason: str) -> None:
    """Sizes that disagree would mix the blocks of two slots or two ranks."""
    with pytest.raises(InternalError, match=reason):
        small_worker(**changes)


def test_shutdown_gives_the_region_back_once() -> None:
    """A worker may be shut down twice; the region must not be."""
    released: list[int] = []
    tensor = torch.zeros((8, 16), dtype=torch.int8)
    caches = CanonicalKVCaches([CanonicalKVCacheTensor(tensor, 16)], [[CanonicalKVCacheRef(0, 16)]])
    region = bytearray(64)
    worker = CPUPlatformWorker(
        caches, memoryview(region), HostLayout(2, 32, 2, 0, 32), release=lambda: released.append(1)
    )
    worker.shutdown()
    worker.shutdown()
    assert released == [1]
    region.clear()  # raises BufferError if a view were left
