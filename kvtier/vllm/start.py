"""Starts the runtime of one engine, with vLLM's manager in front, and logs that it is ready."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

from kvtier import __version__
from kvtier.engine.link.circuit_breaker import BreakerState
from kvtier.plugin_api.log import log
from kvtier.runtime import open_runtime, wait_for_servers
from kvtier.vllm.hosted.backend import HostingEngine
from kvtier.vllm.recording import RecordingManager, open_recorder
from kvtier.vllm.scheduler.manager import KVTierManager

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vllm.v1.kv_offload.base import OffloadingMetricMetadata, OffloadingSpec

    from kvtier.core.statistics import TierStatistics
    from kvtier.engine.facade import SchedulerFacade
    from kvtier.plugin_api.backend import Namespace
    from kvtier.plugin_api.slot_memory import SlotMemory
    from kvtier.settings.runtime_config import RuntimeConfig
    from kvtier.vllm.memory.region import Region


def build_manager(
    config: RuntimeConfig,
    spec: OffloadingSpec,
    *,
    definitions: Mapping[str, OffloadingMetricMetadata],
    memory: SlotMemory,
    namespace: Namespace,
    weights: str,
    region: Region,
) -> KVTierManager:
    """Start the runtime for one engine. Scheduler process only.

    ``weights``: what identifies the weights, for the log. If anything raises, all is closed again
    but ``memory`` and ``region``.
    """
    began_s = time.monotonic()
    hosting = HostingEngine(spec, memory)
    with ExitStack() as undo:  # another attempt in this process may use the same files
        recorder = open_recorder(config, spec)
        if recorder is not None:
            undo.callback(recorder.close, config.close_timeout_s)
        facade = open_runtime(
            config,
            memory,
            namespace,
            collect_events=spec.kv_events_config.enable_kv_cache_events,
            engine=hosting,
        )
        undo.callback(facade.close)
        manager_class = KVTierManager if recorder is None else RecordingManager
        manager = manager_class(facade, config, spec, definitions, memory, region, hosting)
        connecting = wait_for_servers(config, lambda: _polled(facade))
        if recorder is not None:
            assert isinstance(manager, RecordingManager)
            manager.record_to(recorder)
        region.try_unlink()
        _say_ready(facade, config, connecting, weights, time.monotonic() - began_s)
        undo.pop_all()
    return manager


def _polled(facade: SchedulerFacade) -> Sequence[TierStatistics]:
    facade.get_finished()
    return facade.statistics().tiers


def _say_ready(
    facade: SchedulerFacade,
    config: RuntimeConfig,
    connecting: Sequence[str],
    weights: str,
    seconds: float,
) -> None:
    """Log the one line about the whole engine. Each tier logs its own once it is open."""
    tiers = facade.statistics().tiers
    away = [tier.name for tier in tiers if tier.breaker == BreakerState.DISABLED.name]
    log.info(
        "kvtier is ready",
        version=__version__,
        blocks=config.slot_count,
        block_bytes=config.block_bytes,
        eviction_policy=config.eviction_policy,
        tiers=", ".join(tier.name for tier in tiers) or "none",
        weights=weights,
        **({"without": ", ".join(away)} if away else {}),
        **({"connecting": ", ".join(connecting)} if connecting else {}),
        seconds=round(seconds, 3),
    )
