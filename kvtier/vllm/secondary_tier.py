"""Provides a kvtier tier as a secondary tier of vLLM's own tiering.

It is an entry of ``secondary_tiers`` of vLLM's ``TieringOffloadingSpec``::

    {"type": "KVTierSecondaryTier", "module_path": "kvtier.vllm",
     "tier": {"type": "disk", "path": "/nvme/kvtier", "capacity_bytes": "200GB"}}

The primary tier, its slots and its policy are vLLM's; they are managed in
``vllm/v1/kv_offload/tiering/manager.py``. Its manager reuses a slot as soon as a job has
finished, and waits for that without a limit. So no storage gets a view of its memory:
``kvtier/engine/staged/staged_facade.py`` has the reason and the rules.

All methods run on vLLM's scheduler thread, or under its manager's lock. None waits for the
tier except ``drain_jobs`` and ``shutdown``, and those for ``close_timeout_s`` at most.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

from typing_extensions import override
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadPolicy,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from kvtier.core.block_state import BlockState
from kvtier.plugin_api.log import log
from kvtier.plugin_api.slot_memory import SlotMemory
from kvtier.runtime import open_staged_tier, wait_for_servers
from kvtier.settings.secondary_tier import read_secondary_tier
from kvtier.vllm.hosted.backend import HostingEngine
from kvtier.vllm.hosted.stats import definitions_of
from kvtier.vllm.hosted.tier_class import info_keys_of
from kvtier.vllm.identity.adapters import know_adapters
from kvtier.vllm.identity.media import know_media, mark_contents
from kvtier.vllm.identity.own_spec import namespace_of, vllm_configs
from kvtier.vllm.identity.sharing import apart_if_unknown
from kvtier.vllm.identity.weight_updates import weights_here
from kvtier.vllm.releases import positions_of
from kvtier.vllm.relied_on import check_release
from kvtier.vllm.scheduler.groups import in_token_order
from kvtier.vllm.scheduler.kv_events import KVEvents, Place
from kvtier.vllm.scheduler.metric_definitions import prepare_front_end, tier_metric_definitions
from kvtier.vllm.scheduler.metrics import TierExporter
from kvtier.vllm.scheduler.tier_facts import TierFacts
from kvtier.vllm.workarounds.connector_hooks import hook_connector
from kvtier.vllm.workarounds.connectors_beside import OWN_SPEC, check_place_of_tier
from kvtier.vllm.workarounds.guarded_observer import GuardedObserver

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
        OffloadingConnectorStats,
    )
    from vllm.v1.kv_offload.base import (
        OffloadingEvent,
        OffloadingMetricMetadata,
        OffloadingSpec,
        ReqContext,
        ScheduleEndContext,
    )
    from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector
    from vllm.v1.kv_offload.tiering.base import TransferJob

    from kvtier.core.statistics import TierStatistics
    from kvtier.engine.staged.staged_job import Finished
    from kvtier.settings.runtime_config import RuntimeConfig

_MEANING: Final = {
    BlockState.ABSENT: LookupResult.MISS,
    BlockState.PROBING: LookupResult.RETRY,
    BlockState.READY: LookupResult.HIT,
}


class KVTierSecondaryTier(SecondaryTierManager):  # type: ignore[misc]  # vLLM is untyped here
    """A kvtier tier behind vLLM's primary tier. Raises ``ConfigError`` for a bad entry."""

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: BackpressureDetector | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        **options: Any,  # noqa: ANN401 - the entry's keys
    ) -> None:
        """``options``: the entry's other keys. ``clock``: for tests."""
        check_release()
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        hook_connector()
        check_place_of_tier(type(self).__name__, *OWN_SPEC, vllm_configs())
        slot_count, block_bytes = len(primary_kv_view), int(self.block_size_bytes)
        config = read_secondary_tier(
            options,
            slot_count=slot_count,
            block_bytes=block_bytes,
            number=_number_in(offloading_spec, options),
            dp_rank=int(offloading_spec.config.parallel.data_parallel_index),
        )
        tier = config.tiers[0]
        events = offloading_spec.kv_events_config.enable_kv_cache_events
        self._clock = clock
        self._several_groups = len(offloading_spec.config.groups) > 1
        self._submitted: dict[int, float] = {}
        self._context = RequestOffloadingContext(
            policy=OffloadPolicy.REQUEST_LEVEL if tier.request_level else OffloadPolicy.CHUNK_LEVEL
        )
        self.tier_type = tier.type  # vLLM's metrics name it so: "1:disk"
        facts = TierFacts(tier)
        self.medium, self.locality = facts.medium, facts.locality
        self.cache_hit_source = facts.hit_source
        self._watch = GuardedObserver()
        place = Place(facts.medium, facts.locality, tier.name, lambda: self._facade.evicts)
        self._events = KVEvents([place], self_describing=False)
        staging = SlotMemory.anonymous(config.slot_count, block_bytes)
        # One of vLLM's tiers may be inside. It is built over the staging slots.
        self._hosting = HostingEngine(offloading_spec, staging)
        hosted = definitions_of([options["tier"]])
        self._metrics = TierExporter(tier, self._watch, self._hosting.stats, hosted)
        know_adapters()
        know_media(trusts=config.media_ids == "trust")
        namespace = namespace_of(offloading_spec)
        self._weights = weights_here(namespace.facts["worker"])
        self._facade = open_staged_tier(
            apart_if_unknown(config, namespace.facts),
            SlotMemory(primary_kv_view, slot_count, block_bytes),
            staging,
            namespace,
            collect_events=events,
            engine=self._hosting,
            clock=clock,
        )
        self._begin_generation = self._weights.add(self.drain_jobs, self._facade.reset, config)
        self._say_ready(config, slot_count)

    def _say_ready(self, config: RuntimeConfig, slot_count: int) -> None:
        """Log that it is ready, once it is connected to its server or has had the time."""
        try:
            connecting = wait_for_servers(config, self._polled)
        except BaseException:  # vLLM closes only a tier that it got
            self._facade.close()
            raise
        log.info(
            "kvtier's tier is ready behind vLLM's primary tier",
            tier=config.tiers[0].name,
            blocks=slot_count,
            block_bytes=config.block_bytes,
            staging_blocks=config.slot_count,
            **({"connecting": ", ".join(connecting)} if connecting else {}),
        )

    def _polled(self) -> Sequence[TierStatistics]:
        self._facade.has_pending_work()
        return self._facade.statistics().tiers

    # --- requests and lookups ---

    @override
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self._facade.on_request_started(req_context.req_id)
        return self._context

    @override
    def on_request_finished(self, req_context: ReqContext) -> None:
        positions = positions_of(req_context)
        order = in_token_order(positions, positions) if self._several_groups else positions
        self._facade.on_request_finished(req_context.req_id, order)

    @override
    def lookup(self, key: bytes, req_context: ReqContext) -> LookupResult:
        return _MEANING[self._facade.lookup(key, req_context.req_id)]

    @override
    def touch(self, keys: Collection[bytes], req_context: ReqContext) -> None:
        if self._several_groups:
            keys = in_token_order(keys, positions_of(req_context))
        self._facade.touch(keys, req_context.req_id)

    # --- jobs ---

    @override
    def submit_store(self, job_metadata: TransferJob) -> None:
        self._submitted[job_metadata.job_id] = self._clock()
        self._facade.submit_store(*_job(job_metadata))

    @override
    def submit_load(self, job_metadata: TransferJob) -> None:
        self._submitted[job_metadata.job_id] = self._clock()
        self._facade.submit_load(*_job(job_metadata))

    @override
    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Return each job once. Its slots are not touched any more."""
        return [self._result(finished) for finished in self._facade.drain_finished()]

    def _result(self, finished: Finished) -> JobResult:
        is_partial = finished.is_load and finished.failed and finished.succeeded
        return JobResult(
            job_id=finished.job,
            success=not finished.failed,
            successful_keys=tuple(finished.succeeded) if is_partial else None,
            transfer_time=self._clock() - self._submitted.pop(finished.job),
            # None instead of 0: vLLM's backpressure detector divides by it.
            transfer_bytes=finished.moved * self.block_size_bytes or None,
        )

    @override
    def has_pending_work(self) -> bool:
        return self._facade.has_pending_work()

    @override
    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._weights.on_step()
        self._facade.step_end()

    def serve_external_requests(self, parent: Any) -> None:  # noqa: ANN401 - vLLM has no stubs
        """Do nothing: this tier serves no external requests."""

    # --- events and metrics ---

    @override
    def take_events(self) -> Iterable[OffloadingEvent]:
        return self._watch.safely("events", self._drained_events) or []

    def _drained_events(self) -> list[OffloadingEvent]:
        return self._events.drain(self._facade.take_events())

    @override
    def get_stats(self) -> OffloadingConnectorStats | None:
        return self._watch.safely("metrics", self._collected)

    def _collected(self) -> OffloadingConnectorStats | None:
        now = self._facade.statistics()
        return self._metrics.collect(now.tiers[0], self._facade.drain_jobs(), now.faults)

    @classmethod
    @override
    def build_metric_definitions(
        cls, extra_config: dict[str, Any]
    ) -> dict[str, OffloadingMetricMetadata]:
        mark_contents()  # vLLM's front end calls this before it takes in requests
        prepare_front_end()  # vLLM registers the metrics returned here
        tier = extra_config.get("tier")
        tiers = [tier] if isinstance(tier, dict) else []
        return {**definitions_of(tiers), **tier_metric_definitions(tiers)}

    @classmethod  # no @override: not every release has it
    def config_info_keys(cls, tier_config: dict[str, Any]) -> tuple[str, ...]:
        """Return the label names of a vLLM tier hosted inside."""
        return info_keys_of(tier_config["tier"])

    def config_info(self) -> Mapping[str, str | int | float | bool]:
        """Return the labels of a vLLM tier hosted inside."""
        return self._hosting.labels_of.get(self._facade.statistics().tiers[0].name, {})

    # --- resets and the end ---

    @override
    def drain_jobs(self) -> None:
        """Finish every job, and begin a new generation: vLLM calls this only in a reset.

        The weights may have changed afterwards, so no block stored before is found again,
        unless ``on_reset`` is ``keep``. A tier that hangs costs ``close_timeout_s``; its
        jobs have then failed, and it must not touch vLLM's slots any more.
        """
        self._facade.drain()
        self._begin_generation()

    @override
    def shutdown(self) -> None:
        """Shut down the tier. vLLM's memory is released whether or not it hangs."""
        self._facade.close()


def _job(job: TransferJob) -> tuple[int, str, list[bytes], list[int]]:
    """Return a job with its blocks from head to tail: vLLM lists stored blocks as a set.

    Blocks without room are cut off at the tail, and eviction policies rely on the order.
    """
    slot_of = dict(zip(job.keys, job.chunk_ids.tolist(), strict=True))
    keys = in_token_order(slot_of, positions_of(job.req_context))
    return job.job_id, job.req_context.req_id, keys, [slot_of[key] for key in keys]


def _number_in(spec: OffloadingSpec, options: Mapping[str, Any]) -> int:
    """Return the entry's place in the list, from 1 on, as in vLLM's metric labels."""
    entries = spec.extra_config.get("secondary_tiers", [])
    for number, entry in enumerate(entries, start=1):
        if entry.get("tier") == options.get("tier"):
            return number
    return 1
