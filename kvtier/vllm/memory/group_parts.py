"""Computes which bytes of a row each KV-cache group's blocks use, and which they leave to others.

vLLM lays its KV-cache groups over one another, from byte 0 on, so a row is as long as a block of
the largest group. A smaller group's block uses a part of it:

    group 0   | A | B | C |      a group of three layers
    group 1   | D | E |...|      one of two: behind E lie bytes that another block left there

With several tensors (``LBNHC`` and the like) a worker copies a group's own pages. If all layers of
a block lie side by side (``BLHNC``; DeepSeek-V4), vLLM has it copy the whole block of the GPU for
every group, including what other requests left behind the group's layers: that is cut off here.

The bytes of a row that no block of a group fills are that group's *rest*. The layout of rows stays
as it is, so blocks mean the same to every release of kvtier, and to vLLM's own folder: a rest is
zeroed before a tier gets the row (``SlotMemory.clear_rests``).
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs
from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches

from kvtier.plugin_api.keys import GROUP_BYTES
from kvtier.vllm.memory.pages import HostLayout, host_page_sizes, tensor_offsets

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from kvtier.vllm.memory.pages import Pages

PIECES_MAX: Final = 2000
"""Limit per rank: with more pieces, rows go to tiers as they are. Real models have hundreds."""

_Ranges: TypeAlias = list[tuple[int, int]]
"""Begin and end of each range, in bytes, sorted."""


def own_pages_only(kv_caches: CanonicalKVCaches, pages: Pages | None) -> CanonicalKVCaches:
    """Return the KV caches with each group's part of a packed block, if vLLM copies all of it.

    A group keeps the whole block if it is uncertain where one of its layers' tensors lies.
    """
    if pages is None or len(kv_caches.tensors) != 1 or len(kv_caches.group_data_refs) == 1:
        return kv_caches
    stride = int(kv_caches.tensors[0].page_size_bytes)
    whole = [CanonicalKVCacheRef(0, stride)]
    if any(refs != whole for refs in kv_caches.group_data_refs):
        return kv_caches
    ends = [
        max(_end_in_block(pages, name, page_bytes, stride) for name, page_bytes in layers)
        for layers in (_layer_pages(pages.config, group) for group in pages.groups)
    ]
    refs = [[CanonicalKVCacheRef(0, end)] for end in ends]
    return CanonicalKVCaches(kv_caches.tensors, refs)


def _layer_pages(config: Any, number: int) -> Iterable[tuple[str, int]]:  # noqa: ANN401 - no stubs
    group = config.kv_cache_groups[number]
    spec = group.kv_cache_spec
    each = spec.kv_cache_specs if isinstance(spec, UniformTypeKVCacheSpecs) else {}
    return [(name, int(each.get(name, spec).page_size_bytes)) for name in group.layer_names]


def _end_in_block(pages: Pages, name: str, page_bytes: int, stride: int) -> int:
    """Return where a layer's page ends in a block; the block's end if that is uncertain."""
    cache = pages.caches[name]
    size = cache.element_size()
    kernel_blocks = cache.shape[0] // pages.config.num_blocks
    begin = cache.storage_offset() * size
    steps = zip((kernel_blocks, *cache.shape[1:]), cache.stride(), strict=True)
    seen = sum((count - 1) * step for count, step in steps) * size + size
    end = begin + max(page_bytes, seen)
    is_there = cache.stride(0) * size * kernel_blocks == stride and end <= stride
    return end if is_there else stride


def rests_of_rank(
    kv_caches: CanonicalKVCaches, groups: Sequence[int], layout: HostLayout, *, canonical: bool
) -> dict[str, _Ranges]:
    """Return by group the bytes of a rank's part of a row that only other groups use.

    Groups without a rest are left out. In JSON's form: keys are text.
    """
    sizes = host_page_sizes(kv_caches, canonical=canonical)
    starts = tensor_offsets(sizes, layout)

    def pages_of(ref: CanonicalKVCacheRef) -> Iterable[tuple[int, int]]:
        size = sizes[ref.tensor_idx]
        begin = starts[ref.tensor_idx] - layout.rank_offset
        # Ranks that share a row write a page together.
        used = size if canonical else int(ref.page_size_bytes)
        return [(begin + n * size, begin + n * size + used) for n in range(layout.blocks_per_chunk)]

    own = [
        _joined(page for ref in refs for page in pages_of(ref))
        for refs in kv_caches.group_data_refs
    ]
    edges = sorted({edge for ranges in own for each in ranges for edge in each})
    used = [piece for piece in pairwise(edges) if any(_has(each, piece[0]) for each in own)]
    rests = {
        str(group): _joined(piece for piece in used if not _has(ranges, piece[0]))
        for group, ranges in zip(groups, own, strict=True)
    }
    if sum(map(len, rests.values())) > PIECES_MAX:
        return {}
    return {group: rest for group, rest in rests.items() if rest}


def rests_of_rows(
    of_rank: Mapping[str, _Ranges], rank_bytes: int, ranks: int
) -> dict[bytes, _Ranges]:
    """Return the rests of whole rows of ``ranks`` adjacent parts, by the last bytes of a key."""
    return {
        int(group).to_bytes(GROUP_BYTES, "big"): [
            (rank * rank_bytes + begin, rank * rank_bytes + end)
            for rank in range(ranks)
            for begin, end in rest
        ]
        for group, rest in of_rank.items()
    }


def _joined(ranges: Iterable[tuple[int, int]]) -> _Ranges:
    """Return the same bytes, in as few ranges as possible."""
    joined: _Ranges = []
    for begin, end in sorted(ranges):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return joined


def _has(ranges: _Ranges, byte: int) -> bool:
    number = bisect_right(ranges, byte, key=lambda each: each[0]) - 1
    return number >= 0 and byte < ranges[number][1]
