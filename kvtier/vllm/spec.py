"""The entry point that vLLM loads: ``spec_name: KVTierOffloadingSpec``.

It extends vLLM's ``TieringOffloadingSpec``, so that sizes, the checks of the
canonical layout and the worker on CUDA, ROCm and XPU are vLLM's own; kvtier
replaces vLLM's manager with its own, and adds a worker for the CPU platform.

vLLM builds the spec in each worker (``get_worker``), and then in the scheduler's
process (``get_manager``), always in this order: the KV caches are registered
before the scheduler exists. So ``get_manager`` finds every rank mapped, and rank
0's facts in the header.

Memory on the CPU platform is kvtier's region (``memory/region.py``). On
the others it is vLLM's (``memory/device_region.py``).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from typing_extensions import override
from vllm.config import get_current_vllm_config, get_current_vllm_config_or_none
from vllm.platforms import current_platform
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvtier.errors import ConfigError
from kvtier.plugin_api.slot_memory import SlotMemory
from kvtier.settings.extra_config import cpu_bytes_to_use, for_vllm, read_settings
from kvtier.settings.host_memory import SHARED_MEMORY_FOLDER, HostMemory
from kvtier.settings.plugins import check_keys
from kvtier.settings.vllm_keys import VLLMKeys
from kvtier.vllm.identity.namespace import (
    build_namespace,
    publish_facts,
    published_rests,
    weights_in_words,
)
from kvtier.vllm.memory.cpu_worker import CPUPlatformWorker
from kvtier.vllm.memory.device_region import DeviceRegion, HeaderMap, region_path
from kvtier.vllm.memory.group_parts import own_pages_only, rests_of_rank, rests_of_rows
from kvtier.vllm.memory.pages import HostLayout, Pages
from kvtier.vllm.memory.region import HostRegion, Region, doubled_rank
from kvtier.vllm.memory.region_header import HEADER_BYTES, RegionHeader
from kvtier.vllm.memory.worker_here import WORKER_HERE, WORKER_OF_ANOTHER
from kvtier.vllm.relied_on import check_release
from kvtier.vllm.workarounds.connector_hooks import hook_connector
from kvtier.vllm.workarounds.connectors_beside import check_connectors
from kvtier.vllm.workarounds.windows import check_windows

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.kv_offload.base import (
        CanonicalKVCaches,
        OffloadingManager,
        OffloadingMetricMetadata,
        OffloadingWorker,
    )
    from vllm.v1.kv_offload.config import OffloadingConfig

    from kvtier.settings.runtime_config import RuntimeConfig
    from kvtier.vllm.identity.weight_updates import EngineWeights
    from kvtier.vllm.memory.group_kinds import GroupKind


_VLLM_KEYS: Final = VLLMKeys()
_UNEQUAL_STAGES: Final = (
    "the pipeline stages do not have the same layers. vLLM's connector takes each to be like the "
    "first, so they would write into one another's blocks. Give every stage as many layers of each "
    "kind (VLLM_PP_LAYER_PARTITION), or use tensor parallelism in place of stages."
)


class KVTierOffloadingSpec(TieringOffloadingSpec):  # type: ignore[misc]  # vLLM is untyped here
    """vLLM's tiering spec with kvtier's manager. One instance a process and role."""

    @classmethod
    @override
    def build_metric_definitions(
        cls, extra_config: dict[str, Any]
    ) -> dict[str, OffloadingMetricMetadata]:
        from kvtier.vllm.identity.media import mark_contents  # noqa: PLC0415 - not in workers
        from kvtier.vllm.scheduler.metric_definitions import prepare_front_end  # noqa: PLC0415 - not in workers

        mark_contents()  # vLLM's front end calls this before it takes in requests
        prepare_front_end()  # vLLM registers the metrics returned here
        return cls.metrics(extra_config)

    @classmethod
    def metrics(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        """Return all metrics that a manager may report, by name."""
        from kvtier.vllm.hosted.stats import definitions_of  # noqa: PLC0415 - not in workers
        from kvtier.vllm.scheduler.metric_definitions import metric_definitions  # noqa: PLC0415 - not in workers

        definitions: dict[str, OffloadingMetricMetadata] = super().build_metric_definitions(
            _without_tiers(for_vllm(extra_config))
        )
        tiers = _tiers_in(extra_config)
        return {**definitions_of(tiers), **definitions, **metric_definitions(tiers)}

    @classmethod  # no @override: not every release has it
    def config_info_keys(cls, extra_config: dict[str, Any]) -> tuple[str, ...]:
        """Return the label names that the manager's ``config_info`` fills."""
        inherited = getattr(super(), "config_info_keys", None)
        if inherited is None:
            return ()
        from kvtier.vllm.hosted.tier_class import info_keys_of  # noqa: PLC0415 - not in workers

        keys = list(inherited(_without_tiers(for_vllm(extra_config))))
        for tier in _tiers_in(extra_config):
            keys += info_keys_of(tier)
        return tuple(dict.fromkeys(keys))

    def __init__(self, config: OffloadingConfig) -> None:
        check_release()
        cpu_bytes = cpu_bytes_to_use(config.extra_config)
        HostMemory(config.extra_config["cpu_bytes_to_use"], cpu_bytes).require_machine()
        # Check every key before vLLM reads some of them, less strictly.
        read_settings(config.extra_config, slot_count=1, block_bytes=1, ignores=_VLLM_KEYS)
        super().__init__(replace(config, extra_config=for_vllm(config.extra_config)))
        self.group_kinds: Mapping[bytes, GroupKind] | None = None
        self.weights: EngineWeights | None = None
        self._pages: Pages | None = None
        self._manager: OffloadingManager | None = None
        self._kvtier_worker: OffloadingWorker | None = None
        self._header_rows = 0
        if not self.kv_bytes_per_chunk:
            raise ConfigError(
                f"kv_bytes_per_chunk={self.kv_bytes_per_chunk!r}: vLLM finds no KV cache in this "
                "model that can be offloaded. Remove the kv_transfer_config, or choose another "
                "model."
            )
        if not _on_cpu_platform():
            self._header_rows = -(-HEADER_BYTES // self.kv_bytes_per_chunk)
        if self.slot_count < 1:
            raise ConfigError(
                f"kv_connector_extra_config: cpu_bytes_to_use={cpu_bytes} holds no block: one "
                f"takes {self.kv_bytes_per_chunk} bytes, and kvtier keeps {self._header_rows} for "
                f"itself. Give it at least {(self._header_rows + 1) * self.kv_bytes_per_chunk}."
            )
        hook_connector()
        # Workers are built first: a bad key is refused before the model is loaded.
        check_keys(self.read_settings().tiers, self.block_bytes)

    def read_settings(self) -> RuntimeConfig:
        """Return the configuration of this engine's runtime. Raises ``ConfigError``."""
        return read_settings(
            self.extra_config,
            slot_count=self.slot_count,
            block_bytes=self.block_bytes,
            dp_rank=int(self.config.parallel.data_parallel_index),
            ignores=_VLLM_KEYS,
        )

    def on_groups_known(self, kinds: Mapping[bytes, GroupKind]) -> None:
        """Record the group kinds that vLLM's connector has (``memory/group_kinds.py``)."""
        self.group_kinds = kinds

    def on_caches_known(self, config: KVCacheConfig, caches: Mapping[str, Any]) -> None:
        """Record vLLM's layout of this worker's KV caches, before ``get_worker``."""
        self._pages = Pages(config, [group.group_id for group in self.config.groups], caches)

    @property
    def slot_count(self) -> int:
        """Number of blocks that the primary tier holds."""
        return int(self.num_chunks) - self._header_rows

    @property
    def block_bytes(self) -> int:
        """Bytes of one slot: all ranks' parts of one block, and padding to a page."""
        return int(self.kv_bytes_per_chunk)

    @override
    def get_manager(self) -> OffloadingManager:
        """Build kvtier's manager over the shared region. Scheduler process, once."""
        if self._manager is None:
            # Scheduler side only.
            from kvtier.vllm.identity.adapters import know_adapters  # noqa: PLC0415
            from kvtier.vllm.identity.media import know_media  # noqa: PLC0415
            from kvtier.vllm.identity.sharing import apart_if_unknown, warn_of_lonely_tiers  # noqa: PLC0415
            from kvtier.vllm.identity.weight_updates import weights_here  # noqa: PLC0415
            from kvtier.vllm.start import build_manager  # noqa: PLC0415
            from kvtier.vllm.workarounds.idle import wake_idle_engines  # noqa: PLC0415

            config = self.read_settings()
            know_adapters()
            know_media(trusts=config.media_ids == "trust")
            wake_idle_engines()
            region = self._open_scheduler_region()
            try:
                self._check_ranks(region.header)
                described = region.header.read()
                namespace = build_namespace(self.config, described)
                self.weights = weights_here(namespace.facts["worker"])
                warn_of_lonely_tiers(config, namespace.facts)
                config = apart_if_unknown(config, namespace.facts)
                memory = SlotMemory(
                    region.rows,
                    self.slot_count,
                    self.block_bytes,
                    descriptor=region.fileno(),
                    rests=self._rests_of_rows(described),
                )
                self._manager = build_manager(
                    config,
                    self,
                    definitions=self.metrics(self.extra_config),
                    memory=memory,
                    namespace=namespace,
                    weights=weights_in_words(described),
                    region=region,
                )
            except BaseException:
                region.close()
                WORKER_HERE.release(self.config.engine_id)
                raise
        return self._manager

    @override
    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """Map the region and return the copying worker. Worker process, once."""
        if self._kvtier_worker is None:
            check_windows(self.config, get_current_vllm_config)
            check_connectors(type(self).__name__, get_current_vllm_config_or_none())
            kv_caches = own_pages_only(kv_caches, self._pages)
            if _on_cpu_platform():
                self._kvtier_worker = self._cpu_platform_worker(kv_caches)
            else:
                # vLLM's worker creates and maps vLLM's region; the name exists until
                # the scheduler has seen the flag set here.
                self._kvtier_worker = self._device_worker(kv_caches)
                header_map = HeaderMap(self.config.engine_id, self.slot_count, self.block_bytes)
                try:
                    header = header_map.header(self.config.parallel.world_size)
                    self._leave_facts(header, kv_caches)
                finally:
                    header_map.close()
            WORKER_HERE.note(self.config.engine_id)
        return self._kvtier_worker

    def _device_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        try:
            return super().get_worker(kv_caches)
        except TimeoutError as problem:  # the existing region is smaller than this rank's
            if self.config.parallel.pp_size == 1:
                raise
            raise ConfigError(
                f"engine_id={self.config.engine_id!r}: {_UNEQUAL_STAGES}"
            ) from problem

    def _cpu_platform_worker(self, kv_caches: CanonicalKVCaches) -> CPUPlatformWorker:
        if self.config.canonical_layout:
            self._validate_canonical_refs(kv_caches)
        rank = self.config.parallel.rank
        region = HostRegion(
            self.config.engine_id,
            slot_count=self.slot_count,
            row_bytes=self.block_bytes,
            world_size=self.config.parallel.world_size,
            rank=rank,
            cpu_bytes_to_use=self.extra_config["cpu_bytes_to_use"],
        )
        try:
            worker = CPUPlatformWorker(
                kv_caches,
                region.rows,
                self._host_layout(rank),
                canonical=self.config.canonical_layout,
                release=region.close,
            )
            self._leave_facts(region.header, kv_caches, mapped=True)
        except BaseException:
            region.close()
            raise
        return worker

    def _host_layout(self, rank: int) -> HostLayout:
        shared = self.config.canonical_layout
        part = self.block_bytes if shared else int(self.cpu_page_size_per_worker)
        return HostLayout(
            slot_count=self.slot_count,
            row_bytes=self.block_bytes,
            blocks_per_chunk=int(self.blocks_per_chunk),
            rank_offset=0 if shared or self.replicated_layout else rank * part,
            rank_bytes=part,
        )

    def _leave_facts(
        self, header: RegionHeader, kv_caches: CanonicalKVCaches, *, mapped: bool = False
    ) -> None:
        rank = self.config.parallel.rank
        if not mapped and not header.mark_mapped(rank):
            engine_id = self.config.engine_id
            raise doubled_rank(engine_id, rank, region_path(engine_id))
        header.note_part(rank, int(self.cpu_page_size_per_worker))
        if rank == 0:
            rests = self._rests_of_rank(kv_caches)
            publish_facts(header, get_current_vllm_config, self._pages, rests)
            self._pages = None  # it holds the tensors of the KV caches

    def _rests_of_rank(self, kv_caches: CanonicalKVCaches) -> Mapping[str, Any]:
        """Return the groups' rests in a rank's part of a row; empty if stages may differ."""
        if self.config.parallel.pp_size > 1:
            return {}
        groups = [group.group_id for group in self.config.groups]
        canonical = self.config.canonical_layout
        return rests_of_rank(kv_caches, groups, self._host_layout(0), canonical=canonical)

    def _rests_of_rows(self, described: Mapping[str, Any] | None) -> dict[bytes, Any]:
        layout = self._host_layout(0)
        ranks = self.config.parallel.world_size
        shared = self.config.canonical_layout or self.replicated_layout
        return rests_of_rows(published_rests(described), layout.rank_bytes, 1 if shared else ranks)

    def _check_ranks(self, header: RegionHeader) -> None:
        """Refuse an engine with a rank that maps other memory, none, or with unequal parts.

        vLLM registers the KV caches of all ranks before it builds the scheduler, so
        a rank that has not set its flag here never will. It would load arbitrary
        bytes from its own memory.
        """
        if header.all_mapped():
            self._check_parts(header.parts())
            return
        if WORKER_HERE.is_of_another(self.config.engine_id):
            raise ConfigError(f"engine_id={self.config.engine_id!r}: {WORKER_OF_ANOTHER}")
        missing = ", ".join(map(str, header.missing_ranks()))
        raise ConfigError(
            f"engine_id={self.config.engine_id!r}: of {header.world_size} worker ranks, rank "
            f"{missing} does not share this host's {SHARED_MEMORY_FOLDER}, where kvtier keeps the "
            "blocks of all. Run all ranks of an engine on one host, in containers that share it "
            "(--ipc=host, or one pod); for several hosts use data parallelism, an engine a host."
            + (f" Or {_UNEQUAL_STAGES}" if self.config.parallel.pp_size > 1 else "")
        )

    def _check_parts(self, parts: list[int]) -> None:
        """Refuse ranks that would write into one another's parts of a slot."""
        for rank, part_bytes in enumerate(parts):
            if part_bytes != parts[0]:
                raise ConfigError(
                    f"engine_id={self.config.engine_id!r}: of a block, rank {rank} keeps "
                    f"{part_bytes} bytes and rank 0 {parts[0]}: {_UNEQUAL_STAGES}"
                )

    def _open_scheduler_region(self) -> Region:
        world_size = self.config.parallel.world_size
        if _on_cpu_platform():
            return HostRegion(
                self.config.engine_id,
                slot_count=self.slot_count,
                row_bytes=self.block_bytes,
                world_size=world_size,
                rank=None,
                cpu_bytes_to_use=self.extra_config["cpu_bytes_to_use"],
            )
        return DeviceRegion(
            self.config.engine_id,
            slot_count=self.slot_count,
            row_bytes=self.block_bytes,
            header_rows=self._header_rows,
            rank_bytes=self.cpu_page_size_per_worker,
            world_size=world_size,
        )


def _on_cpu_platform() -> bool:
    return bool(current_platform.is_cpu())


def _without_tiers(extra_config: dict[str, Any]) -> dict[str, Any]:
    """Hide kvtier's tiers from vLLM, which has other types and other keys."""
    return {**extra_config, "secondary_tiers": []}


def _tiers_in(extra_config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return those entries of ``secondary_tiers`` that are mappings. Nothing is checked yet."""
    tiers = extra_config.get("secondary_tiers")
    return [tier for tier in tiers if isinstance(tier, dict)] if isinstance(tiers, list) else []
