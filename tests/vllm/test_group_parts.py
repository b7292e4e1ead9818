"""What of a row the blocks of a KV-cache group have, by what a worker copies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from kvtier.vllm.memory import group_parts
from kvtier.vllm.memory.cpu_worker import CPUPlatformWorker
from kvtier.vllm.memory.group_parts import own_pages_only, rests_of_rank, rests_of_rows
from kvtier.vllm.memory.pages import HostLayout, Pages

BLOCKS = 3
PAGE = 16  #: of the only layer size


def caches(pages: list[int], *groups: list[tuple[int, int]]) -> CanonicalKVCaches:
    """Return tensors of these pages, full of ones; of each group its (tensor, used bytes)."""
    tensors = [torch.ones((BLOCKS, page), dtype=torch.int8) for page in pages]
    return CanonicalKVCaches(
        [CanonicalKVCacheTensor(tensor, tensor.shape[1]) for tensor in tensors],
        [[CanonicalKVCacheRef(*ref) for ref in refs] for refs in groups],
    )


def copied(kv_caches: CanonicalKVCaches, layout: HostLayout, group: int) -> set[int]:
    """Return the bytes of a row that a worker writes for a full block of a group."""
    row = np.zeros(layout.row_bytes, dtype=np.uint8)
    worker = CPUPlatformWorker(kv_caches, memoryview(row), layout)
    sizes = [0] * len(kv_caches.group_data_refs)
    sizes[group] = layout.blocks_per_chunk
    blocks = GPULoadStoreSpec(
        list(range(layout.blocks_per_chunk)), group_sizes=sizes, block_indices=[0] * len(sizes)
    )
    worker.submit_store(1, blocks, CPULoadStoreSpec([0]))
    worker.shutdown()
    return set(np.flatnonzero(row).tolist())


@pytest.mark.parametrize("per_slot", [1, 3])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rest_is_what_a_worker_copies_for_others_and_not_for_this_group(
    per_slot: int, rank: int
) -> None:
    kv_caches = caches(
        [16, 8, 24], [(0, 16), (1, 8), (2, 24)], [(0, 11), (1, 8)], [(0, 16), (2, 20)], [(2, 24)]
    )
    part = 48 * per_slot
    layout = HostLayout(1, 2 * part + 5, per_slot, rank * part, part)
    of_rank = rests_of_rank(kv_caches, (7, 8, 9, 300), layout, canonical=False)
    assert set(of_rank) == {"8", "9", "300"}  # the first has all of it
    rows = rests_of_rows(of_rank, part, 2)
    own = [copied(kv_caches, layout, group) for group in range(4)]
    for group, each in zip((8, 9, 300), own[1:], strict=True):
        rest = {
            byte
            for begin, end in rows[group.to_bytes(4, "big")]
            for byte in range(begin, end)
            if byte // part == rank
        }
        assert rest == set.union(*own) - each


def test_groups_of_equal_size_leave_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """That is what most models have. What leaves too many pieces goes to tiers as it is."""
    layout = HostLayout(1, 24, 1, 0, 24)
    equal = caches([16, 8], [(0, 16), (1, 8)], [(1, 8), (0, 16)])
    assert rests_of_rank(equal, (0, 1), layout, canonical=False) == {}
    unequal = caches([16, 8], [(0, 16), (1, 8)], [(1, 8)])
    assert rests_of_rank(unequal, (0, 1), layout, canonical=False) == {"1": [(0, 16)]}
    monkeypatch.setattr(group_parts, "PIECES_MAX", 0)
    assert rests_of_rank(unequal, (0, 1), layout, canonical=False) == {}


@dataclass
class Packed:
    """An engine whose layers lie side by side in a block: of the first group three, then one."""

    kv_caches: CanonicalKVCaches
    pages: Pages


def packed(**moved: torch.Tensor) -> Packed:
    """Return one. ``moved``: layers that are elsewhere than vLLM puts them."""
    stride = 3 * PAGE
    memory = torch.zeros(BLOCKS * stride, dtype=torch.int8)
    spec: Any = FullAttentionSpec(block_size=1, num_kv_heads=1, head_size=4, dtype=torch.float16)
    assert spec.page_size_bytes == PAGE
    groups = [KVCacheGroupSpec(["a", "b", "c"], spec), KVCacheGroupSpec(["d"], spec)]
    views = {
        name: memory.as_strided((BLOCKS, PAGE), (stride, 1), at)
        for name, at in (("a", 0), ("b", PAGE), ("c", 2 * PAGE), ("d", 0))
    }
    whole = CanonicalKVCacheTensor(memory.view(BLOCKS, stride), stride)
    return Packed(
        CanonicalKVCaches([whole], [[CanonicalKVCacheRef(0, stride)]] * 2),
        Pages(KVCacheConfig(BLOCKS, [], groups), (0, 1), {**views, **moved}),
    )


def ends(found: CanonicalKVCaches) -> list[int]:
    return [ref.page_size_bytes for refs in found.group_data_refs for ref in refs]


def test_of_a_packed_block_a_group_has_its_own_pages() -> None:
    engine = packed()
    found = own_pages_only(engine.kv_caches, engine.pages)
    assert ends(found) == [3 * PAGE, PAGE]
    assert found.tensors is engine.kv_caches.tensors


def test_a_group_keeps_the_whole_block_if_a_layer_is_not_seen_to_be_in_its_part() -> None:
    """It would lose KV data."""
    by_layers = torch.zeros((BLOCKS, PAGE), dtype=torch.int8)
    longer = torch.zeros((BLOCKS, 3 * PAGE), dtype=torch.int8)
    for elsewhere in (by_layers, longer):
        engine = packed(d=elsewhere)
        assert ends(own_pages_only(engine.kv_caches, engine.pages)) == [3 * PAGE] * 2


def test_what_is_not_packed_stays_as_it_is() -> None:
    several = caches([16, 8], [(0, 16), (1, 8)], [(0, 16)])
    assert own_pages_only(several, packed().pages) is several
    one_group = caches([16], [(0, 16)])
    assert own_pages_only(one_group, packed().pages) is one_group
    unpadded = caches([16], [(0, 16)], [(0, 11)])
    assert own_pages_only(unpadded, packed().pages) is unpadded
    assert own_pages_only(packed().kv_caches, None).group_data_refs
