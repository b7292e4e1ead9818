"""The two managers that are compared, each set up as vLLM would set it up.

Both get slots in private memory, a ReqContext per request and keys of their
own: what vLLM makes anew for each request is made anew here.
"""

from __future__ import annotations

import hashlib
import mmap
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, cast

from typing_extensions import override
from vllm.v1.kv_offload.base import ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager
from vllm.v1.kv_offload.tiering.manager import (
    CPUPrimaryTierOffloadingManager,
    TieringOffloadingManager,
)
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvtier.plugin_api.backend import Namespace
from kvtier.plugin_api.slot_memory import SlotMemory
from kvtier.runtime import open_runtime
from kvtier.settings.extra_config import read_settings
from kvtier.vllm import KVTierOffloadingSpec
from kvtier.vllm.memory.cpu_worker import CPUPlatformWorker
from kvtier.vllm.memory.pages import HostLayout
from kvtier.vllm.scheduler.manager import KVTierManager

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker

KVTIER: Final = "kvtier"
VLLM: Final = "vllm"
SIDES: Final = (VLLM, KVTIER)

BLOCK_TOKENS: Final = 16
PATIENT: Final = dict.fromkeys(("probe_timeout_s", "promote_timeout_s", "store_timeout_s"), 60.0)
DISK_CAPACITY_BYTES: Final = 1 << 30
"""Of a disk tier: more than any benchmark here stores."""
NOTHING_NEW: Final = ScheduleEndContext(new_req_ids=(), preempted_req_ids=())


def make_keys(first: int, count: int) -> list[bytes]:
    """Return the keys of blocks ``first``, ``first + 1``, ...: new objects at each call."""
    return [
        make_offload_key(hashlib.sha256(number.to_bytes(8, "big")).digest(), 0)
        for number in range(first, first + count)
    ]


def make_context(request: str, keys: Sequence[bytes]) -> Any:  # noqa: ANN401 - vLLM has no stubs
    """Return a request's context as vLLM's connector fills it."""
    context = ReqContext(req_id=request)
    for number, key in enumerate(keys, start=1):
        context.set_offload_key_position(key, number * BLOCK_TOKENS)
    return context


@dataclass(frozen=True)
class Setup:
    """How large a side is, and where its secondary tier lies, if it has one."""

    slot_count: int
    block_bytes: int
    policy: str
    tier_folder: Path | None = None
    tier_type: str = "fs"  #: of kvtier's side; vLLM has no other for a folder


def kvtier_tier(tier_type: str, folder: Path) -> dict[str, Any]:
    """Return the configuration of kvtier's tier in ``folder``: ``"fs"`` or ``"disk"``.

    It is patient, as vLLM's tiers are: on a busy machine figures get worse, and no block a miss.
    """
    if tier_type == "fs":
        return {"type": "fs", "root_dir": str(folder), **PATIENT}
    disk = {"type": "disk", "path": str(folder), "capacity_bytes": DISK_CAPACITY_BYTES}
    return disk | PATIENT


class ManagerSide:
    """One manager, ready for calls. ``close`` gives everything back."""

    def __init__(self, name: str, setup: Setup) -> None:
        self.name = name
        self.has_tier = setup.tier_folder is not None
        build = _kvtier_manager if name == KVTIER else _vllm_manager
        self.manager = build(setup)

    def step(self) -> None:
        """End a scheduler step in which nothing was scheduled."""
        self.manager.on_schedule_end(NOTHING_NEW)

    def reset(self) -> None:
        """Empty the primary tier, and promote again at once: no GPU is under way here."""
        self.manager.reset_cache()
        if hasattr(self.manager, "on_reset_flushed"):  # from vLLM 0.33 on
            self.manager.on_reset_flushed()

    def close(self) -> None:
        """Shut the manager down and unmap its slots."""
        self.manager.shutdown()


def _kvtier_manager(setup: Setup) -> Any:  # noqa: ANN401 - as vLLM's
    tiers = []
    if setup.tier_folder is not None:
        tiers.append(kvtier_tier(setup.tier_type, setup.tier_folder / KVTIER))
    config = read_settings(
        {"eviction_policy": setup.policy, "secondary_tiers": tiers, "on_reset": "keep"},
        slot_count=setup.slot_count,
        block_bytes=setup.block_bytes,
    )
    region = _PrivateRegion(setup)
    facade = open_runtime(config, region.memory, Namespace({}), collect_events=True)
    return KVTierManager(
        facade,
        config,
        cast("Any", offloading_spec()),
        KVTierOffloadingSpec.metrics({"secondary_tiers": tiers}),
        region.memory,
        cast("Any", region),
    )


def _vllm_manager(setup: Setup) -> Any:  # noqa: ANN401 - vLLM has no stubs
    primary = CPUPrimaryTierOffloadingManager(
        num_chunks=setup.slot_count,
        mmap_region=_PrivateRegion(setup),
        cache_policy="lru",
        enable_events=True,
    )
    tiers = []
    if setup.tier_folder is not None:
        tiers.append(
            FileSystemTierManager(
                offloading_spec(),
                primary.get_kv_memoryview(),
                "fs",
                root_dir=str(setup.tier_folder / VLLM),
            )
        )
    return TieringOffloadingManager(primary_tier=primary, secondary_tiers=tiers)


class _PrivateRegion:
    """Slots that no worker maps; what either manager needs of a shared region."""

    def __init__(self, setup: Setup) -> None:
        self.memory = SlotMemory.anonymous(setup.slot_count, setup.block_bytes)
        for start in range(0, len(self.memory.buffer), mmap.PAGESIZE):
            self.memory.buffer[start] = 0  # an engine's workers have touched every page by now
        self._shape = [setup.slot_count, setup.block_bytes]

    def create_kv_memoryview(self) -> memoryview:
        """Return one row a slot, for vLLM."""
        return self.memory.buffer.cast("B", self._shape)

    def cleanup(self) -> None:
        """Do nothing, as ``close``."""

    def try_unlink(self) -> bool:
        """Tell kvtier that there is no name to remove."""
        return True

    def close(self) -> None:
        """Do nothing: the memory goes with the last view of it."""


def offloading_spec() -> SimpleNamespace:
    """Return what both managers and vLLM's fs tier read of an ``OffloadingSpec``."""
    parallel = SimpleNamespace(
        rank=0,
        world_size=1,
        tp_size=1,
        pp_size=1,
        pcp_size=1,
        dcp_size=1,
        is_parallelism_agnostic=True,
    )
    group = SimpleNamespace(tokens_per_block=BLOCK_TOKENS, layer_names=("layer",), group_id=0)
    config = SimpleNamespace(
        groups=[group],
        parallel=parallel,
        replicated_layout=False,
        canonical_layout=False,
        kv_cache_layout=None,
        cache=SimpleNamespace(tokens_per_hash=BLOCK_TOKENS),
        model=SimpleNamespace(name="bench", dtype="bfloat16"),
    )
    return SimpleNamespace(
        config=config,
        blocks_per_chunk=1,
        extra_config={},
        kv_events_config=SimpleNamespace(
            enable_kv_cache_events=True, self_describing_kv_events=False
        ),
    )


class VLLMTieringOnCPUSpec(TieringOffloadingSpec):  # type: ignore[misc]  # vLLM is untyped here
    """vLLM's own tiering on the CPU platform, where vLLM has no worker: kvtier's does the copies.

    Everything that is compared stays vLLM's: the manager, its tiers and the shared region. For a
    single rank, without the canonical layout: what the benchmark runs.
    """

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
