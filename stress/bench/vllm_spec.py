"""vLLM's own tiering on the CPU platform, where vLLM has no worker: kvtier's does the copies.

Everything that is compared stays vLLM's: the manager, its tiers and the shared
region. The same worker serves kvtier's side.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from typing_extensions import override
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvtier.vllm.memory.cpu_worker import CPUPlatformWorker
from kvtier.vllm.memory.pages import HostLayout

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker


class VLLMTieringOnCPUSpec(TieringOffloadingSpec):  # type: ignore[misc]  # vLLM is untyped here
    """For a single rank, without the canonical layout: what the benchmark runs."""

    _cpu_worker: OffloadingWorker | None = None

    @override
    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """Map vLLM's region and return the worker that copies. Worker process, once."""
        if self._cpu_worker is None:
            region = SharedOffloadRegion(
                engine_id=self.config.engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            rows = memoryview(region.base_tensor.numpy().data).cast("B")

            def release() -> None:
                rows.release()
                region.cleanup()

            layout = HostLayout(
                slot_count=int(self.num_chunks),
                row_bytes=int(self.kv_bytes_per_chunk),
                blocks_per_chunk=int(self.blocks_per_chunk),
                rank_offset=0,
                rank_bytes=int(self.cpu_page_size_per_worker),
            )
            self._cpu_worker = CPUPlatformWorker(kv_caches, rows, layout, release=release)
        return self._cpu_worker
