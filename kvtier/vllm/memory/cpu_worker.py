"""Copies between the engine's KV tensors and host slots on the CPU platform.

vLLM's own worker needs a GPU's copy engine. Here both sides are host memory,
so a transfer is a few vectorised NumPy assignments, done inside ``submit_*``.
So order needs no extra work: the connector submits stores and loads before the
forward pass of a step. A store has read its blocks before anything may
overwrite them, and a load is complete before attention reads it.

``memory/pages.py`` defines where bytes lie.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalPageMapping,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)

from kvtier.errors import InternalError
from kvtier.vllm.memory.pages import (
    EnginePages,
    HostLayout,
    HostStrip,
    flat_pages,
    host_page_sizes,
    tensor_offsets,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

# NumPy copies fancy-indexed pages through a temporary; one of this size stays in the CPU cache.
_PIECE_BYTES = 1 << 20


@dataclass(frozen=True)
class _Route:
    """One strip of pages: corresponding pieces of the engine's and of the host's memory."""

    engine: NDArray[Any]  #: (num_blocks, fragments)
    host: NDArray[Any]  #: (slot_count, blocks_per_chunk, fragments)
    mapping: CanonicalPageMapping | None

    @property
    def page_bytes(self) -> int:
        return int(self.engine.itemsize * self.engine.shape[1])


@dataclass(frozen=True)
class _Plan:
    """One group's share of a transfer: page i is copied between these positions."""

    routes: Sequence[_Route]
    blocks: NDArray[np.int64]
    slots: NDArray[np.int64]
    sub_blocks: NDArray[np.int64]


class CPUPlatformWorker(OffloadingWorker):  # type: ignore[misc]  # vLLM is untyped here
    """Moves KV pages for one worker rank. One thread: the worker's.

    Raises ``InternalError`` at construction if the tensors do not fit the row,
    and from ``submit_*`` if a transfer's ids do not fit the tensors; nothing is
    copied then. ``release`` is called once the views are dropped.
    """

    def __init__(
        self,
        kv_caches: CanonicalKVCaches,
        region: memoryview,
        layout: HostLayout,
        *,
        canonical: bool = False,
        release: Callable[[], None] | None = None,
    ) -> None:
        self._layout = layout
        self._release = release
        self._finished: list[TransferResult] = []
        host = np.frombuffer(region, dtype=np.uint8)
        engines = [flat_pages(entry) for entry in kv_caches.tensors]
        sizes = host_page_sizes(kv_caches, canonical=canonical)
        offsets = tensor_offsets(sizes, layout)
        self._block_counts = [
            min((engines[ref.tensor_idx].count for ref in refs), default=0)
            for refs in kv_caches.group_data_refs
        ]
        self._routes: list[list[_Route]] = []
        for refs in kv_caches.group_data_refs:
            routes: list[_Route] = []
            for ref in refs:
                index = ref.tensor_idx
                strip = HostStrip(host, layout, offsets[index], sizes[index])
                routes += _routes_of(ref, engines[index], strip, canonical=canonical)
            self._routes.append(routes)

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        """Copy engine pages into host slots. Done when this returns."""
        started_s = time.perf_counter()
        size = 0
        for plan in self._plans(job_id, src_spec, dst_spec):
            for route in plan.routes:
                size += _store(route, plan)
        self._finish(job_id, size, started_s)
        return True

    def submit_load(
        self,
        job_id: int,
        src_spec: LoadStoreSpec,
        dst_spec: GPULoadStoreSpec,
        expedited: bool = False,  # noqa: FBT001, FBT002 - vLLM's signature
    ) -> bool:
        """Copy host slots into engine pages. Done when this returns, expedited or not."""
        del expedited
        started_s = time.perf_counter()
        size = 0
        for plan in self._plans(job_id, dst_spec, src_spec):
            for route in plan.routes:
                size += _load(route, plan)
        self._finish(job_id, size, started_s)
        return True

    def get_finished(self) -> list[TransferResult]:
        """Return each finished transfer once, in the order of submission."""
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Return at once: submitted transfers are already done."""
        del job_ids

    def shutdown(self) -> None:
        """Drop the views and release the region. Safe to call twice."""
        self._routes = []
        self._finished = []
        release, self._release = self._release, None
        if release is not None:
            release()

    def _finish(self, job_id: int, size: int, started_s: float) -> None:
        self._finished.append(
            TransferResult(
                job_id=job_id,
                success=True,
                transfer_size=size,
                transfer_time=time.perf_counter() - started_s,
            )
        )

    def _plans(
        self, job_id: int, engine_spec: LoadStoreSpec, host_spec: LoadStoreSpec
    ) -> list[_Plan]:
        """Split a transfer by group, and check every id before the first copy."""
        if not isinstance(engine_spec, GPULoadStoreSpec):
            raise InternalError(f"job {job_id}: {type(engine_spec).__name__} has no engine blocks")
        if not isinstance(host_spec, BlockIDsLoadStoreSpec):
            raise InternalError(f"job {job_id}: {type(host_spec).__name__} has no slot numbers")
        blocks = np.asarray(engine_spec.block_ids, dtype=np.int64)
        slots = np.asarray(host_spec.block_ids, dtype=np.int64)
        sizes, firsts = engine_spec.group_sizes, engine_spec.block_indices
        if not len(sizes) == len(firsts) == len(self._routes):
            raise InternalError(
                f"job {job_id}: {len(sizes)} group sizes and {len(firsts)} block indices for "
                f"{len(self._routes)} KV-cache groups"
            )
        if blocks.ndim != 1 or len(blocks) != sum(sizes):
            raise InternalError(
                f"job {job_id}: group sizes {list(sizes)} do not add up to {blocks.shape} blocks"
            )
        _require_range(job_id, "slot", slots, self._layout.slot_count)
        per_slot = self._layout.blocks_per_chunk
        plans = []
        block_at = slot_at = 0
        for group, (size, first) in enumerate(zip(sizes, firsts, strict=True)):
            if size == 0:
                continue
            skip = first % per_slot
            places = np.arange(skip, skip + size)
            slots_taken = -(-(skip + size) // per_slot)
            group_blocks = blocks[block_at : block_at + size]
            group_slots = slots[slot_at : slot_at + slots_taken]
            if len(group_slots) != slots_taken:
                raise InternalError(
                    f"job {job_id}: group {group} has {size} blocks from {first} on, which take "
                    f"{slots_taken} slots of {per_slot}; {len(group_slots)} were given"
                )
            _require_range(job_id, f"group {group} block", group_blocks, self._block_counts[group])
            plans.append(
                _Plan(
                    self._routes[group],
                    group_blocks,
                    group_slots[places // per_slot],
                    places % per_slot,
                )
            )
            block_at += size
            slot_at += slots_taken
        if slot_at != len(slots):
            raise InternalError(
                f"job {job_id}: {len(slots)} slots given, the groups take {slot_at}"
            )
        return plans


def _require_range(job_id: int, what: str, ids: NDArray[np.int64], count: int) -> None:
    """Refuse ids outside 0..count-1: NumPy would take negative ones from the end."""
    wrong = ids[(ids < 0) | (ids >= count)]
    if len(wrong):
        raise InternalError(f"job {job_id}: {what} {wrong[0]} is outside 0..{count - 1}")


def _store(route: _Route, plan: _Plan) -> int:
    blocks, slots, sub_blocks = plan.blocks, plan.slots, plan.sub_blocks
    mapping = route.mapping
    if mapping is not None and mapping.num_writers > 1:
        # Ranks that hold the same bytes take turns. The number that picks the
        # writer must be the same on all of them, so it counts host pages.
        host_pages = slots * route.host.shape[1] + sub_blocks
        mine = host_pages % mapping.num_writers == mapping.writer_index
        blocks, slots, sub_blocks = blocks[mine], slots[mine], sub_blocks[mine]
    step = max(1, _PIECE_BYTES // route.page_bytes)
    for at in range(0, len(blocks), step):
        piece = slice(at, at + step)
        route.host[slots[piece], sub_blocks[piece]] = route.engine[blocks[piece]]
    return len(blocks) * route.page_bytes


def _load(route: _Route, plan: _Plan) -> int:
    step = max(1, _PIECE_BYTES // route.page_bytes)
    for at in range(0, len(plan.blocks), step):
        piece = slice(at, at + step)
        route.engine[plan.blocks[piece]] = route.host[plan.slots[piece], plan.sub_blocks[piece]]
    return len(plan.blocks) * route.page_bytes


def _routes_of(
    ref: CanonicalKVCacheRef, engine: EnginePages, host: HostStrip, *, canonical: bool
) -> list[_Route]:
    if not canonical:
        size = int(ref.page_size_bytes)
        return [_Route(engine.view(0, size, 1, size), host.view(0, size, 1, size), None)]
    mapping = ref.mapping
    assert mapping is not None, "host_page_sizes has refused it"
    return [
        _Route(
            engine.view(run.local_offset, run.fragment_size, run.num_fragments, run.local_stride),
            host.view(
                run.canonical_offset, run.fragment_size, run.num_fragments, run.canonical_stride
            ),
            mapping,
        )
        for run in mapping.runs
    ]
