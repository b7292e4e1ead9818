"""Defines where a KV page's bytes lie, in the engine's tensors and in a row of the region.

The shape is vLLM's, so that rows mean the same on every platform:

    row of a slot   | rank 0 | rank 1 | ... | padding to a page |
    a rank's part   | tensor 0 | tensor 1 | ... |
    a tensor's part | sub-block 0 | ... | sub-block blocks_per_chunk-1 |

A sub-block is one KV page of the engine, of which a group's layer may use only
the first ``ref.page_size_bytes``. In the canonical layout the row has one part
that all ranks share, and a page is cut into fragments that each rank puts
where a single rank would have them.

Each view's dtype is as long as one contiguous copy: so NumPy moves whole pages,
and checks the view against the end of its buffer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from kvtier.errors import InternalError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.kv_offload.base import CanonicalKVCaches, CanonicalKVCacheTensor


class Pages(NamedTuple):
    """The KV caches of one worker, as vLLM has laid them out."""

    config: KVCacheConfig
    groups: Sequence[int]  #: the offloaded ones
    caches: Mapping[str, Any] = {}  #: tensors by layer; none in a scheduler, which lacks them


@dataclass(frozen=True)
class HostLayout:
    """Where this rank's bytes lie in the region, in bytes."""

    slot_count: int
    row_bytes: int  #: from one slot to the next
    blocks_per_chunk: int  #: KV pages of the engine in one slot
    rank_offset: int  #: start of this rank's part in a row; 0 if ranks share it
    rank_bytes: int  #: length of this rank's part; the whole row if ranks share it


@dataclass(frozen=True)
class EnginePages:
    """One KV tensor as bytes: page i starts at ``offset + i * stride``."""

    memory: NDArray[np.uint8]
    offset: int
    stride: int
    count: int
    page_bytes: int

    def view(self, offset: int, size: int, fragments: int, step: int) -> NDArray[Any]:
        """Return (count, fragments) pieces of ``size`` bytes, ``step`` apart in a page."""
        end = offset + (fragments - 1) * step + size
        if not 0 < size <= end <= self.page_bytes:
            raise InternalError(
                f"a piece that ends at byte {end} does not fit a KV page of {self.page_bytes} bytes"
            )
        return np.ndarray(
            (self.count, fragments),
            dtype=f"V{size}",
            buffer=self.memory,
            offset=self.offset + offset,
            strides=(self.stride, step),
        )


@dataclass(frozen=True)
class HostStrip:
    """One tensor's part of all rows."""

    memory: NDArray[np.uint8]
    layout: HostLayout
    offset: int
    page_bytes: int

    def view(self, offset: int, size: int, fragments: int, step: int) -> NDArray[Any]:
        """Return (slot_count, blocks_per_chunk, fragments) pieces of ``size`` bytes."""
        end = offset + (fragments - 1) * step + size
        if not 0 < size <= end <= self.page_bytes:
            raise InternalError(
                f"a piece that ends at byte {end} does not fit a host page of "
                f"{self.page_bytes} bytes"
            )
        layout = self.layout
        return np.ndarray(
            (layout.slot_count, layout.blocks_per_chunk, fragments),
            dtype=f"V{size}",
            buffer=self.memory,
            offset=self.offset + offset,
            strides=(layout.row_bytes, self.page_bytes, step),
        )


def flat_pages(entry: CanonicalKVCacheTensor) -> EnginePages:
    """View a KV tensor as bytes, whatever its type and strides."""
    tensor = entry.tensor
    if tensor.device.type != "cpu":
        raise InternalError(f"the CPU platform's worker was given a tensor on {tensor.device}")
    pages = tensor.view(torch.int8).flatten(1)
    if pages.stride(1) != 1 or pages.untyped_storage().data_ptr() != (
        tensor.untyped_storage().data_ptr()
    ):
        raise InternalError(
            f"a KV tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} has pages "
            "with gaps in them"
        )
    if pages.shape[1] != entry.page_size_bytes:
        raise InternalError(
            f"a KV tensor has pages of {pages.shape[1]} bytes, page_size_bytes says "
            f"{entry.page_size_bytes}"
        )
    memory = torch.empty(0, dtype=torch.uint8).set_(pages.untyped_storage()).numpy()
    return EnginePages(
        memory, int(pages.storage_offset()), pages.stride(0), pages.shape[0], pages.shape[1]
    )


def host_page_sizes(kv_caches: CanonicalKVCaches, *, canonical: bool) -> list[int]:
    """Return for each tensor the bytes that one of its pages takes in a row."""
    if not canonical:
        return [int(entry.page_size_bytes) for entry in kv_caches.tensors]
    sizes = [0] * len(kv_caches.tensors)
    for ref in (ref for refs in kv_caches.group_data_refs for ref in refs):
        if ref.mapping is None:
            raise InternalError(
                f"canonical_layout=True, but KV tensor {ref.tensor_idx} has no canonical mapping. "
                "Remove canonical_layout from kv_connector_extra_config."
            )
        size = int(ref.mapping.canonical_page_size_bytes)
        sizes[ref.tensor_idx] = max(sizes[ref.tensor_idx], size)
    return sizes


def tensor_offsets(sizes: Sequence[int], layout: HostLayout) -> list[int]:
    """Return where each tensor's part starts in a row."""
    offsets = []
    at = layout.rank_offset
    for size in sizes:
        offsets.append(at)
        at += size * layout.blocks_per_chunk
    end = layout.rank_offset + layout.rank_bytes
    if at > end or end > layout.row_bytes:
        raise InternalError(
            f"KV pages of {list(sizes)} bytes times blocks_per_chunk={layout.blocks_per_chunk} "
            f"take bytes {layout.rank_offset}..{at} of a row; this rank's part ends at {end}, the "
            f"row at {layout.row_bytes}"
        )
    return offsets
