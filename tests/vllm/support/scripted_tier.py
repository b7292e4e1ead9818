"""A tier of vLLM's kind that misbehaves on command, loaded by ``module_path`` as a user's own."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, ClassVar

from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingEvent,
    OffloadingGaugeMetadata,
    OffloadingHistogramMetadata,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
        OffloadingConnectorStats,
    )
    from vllm.v1.kv_offload.base import ReqContext
    from vllm.v1.kv_offload.tiering.base import TransferJob

COUNTED = "scripted:jobs"
SEEN = "scripted:sizes"
METHODS = (
    "lookup",
    "submit_store",
    "submit_load",
    "get_finished_jobs",
    "has_pending_work",
    "on_new_request",
    "on_request_finished",
    "on_schedule_end",
    "get_stats",
    "take_events",
    "drain_jobs",
    "shutdown",
)


class ScriptedTier(SecondaryTierManager):  # type: ignore[misc]  # vllm has no stubs
    """Keeps blocks in memory. Jobs end when they are polled, unless they are ``held``."""

    medium: ClassVar[Medium] = Medium.STORAGE
    last: ClassVar[ScriptedTier]  #: the one that was built last

    def __init__(self, *arguments: Any, hangs_in: str = "", raises_in: str = "", **named: Any):
        super().__init__(*arguments, **named)
        self.blocks: dict[bytes, bytes] = {}
        self.requests: set[str] = set()
        self.lies = False  #: loads bring other bytes
        self.unresolved = False  #: lookups say RETRY
        self.failing: set[bytes] = set()  #: loads end at these, and say what was loaded before
        self.held: list[TransferJob] | None = None  #: loads that don't end
        self.extra: list[JobResult] = []  #: results of jobs that nobody submitted
        self.stats: OffloadingConnectorStats | None = None
        self.removed: list[bytes] = []  #: to be told of as events
        self.hangs = threading.Event()
        self.goes_on = threading.Event()
        self.hangs_in, self.raises_in = hangs_in, raises_in
        self.threads: dict[str, set[str]] = {}  #: by method, on which it was called
        self.overlaps: list[tuple[str, str]] = []  #: methods that were called during another
        self._running = ""
        self._results: list[JobResult] = []
        type(self).last = self
        for name in METHODS:
            setattr(self, name, self._scripted(name))

    def _scripted(self, name: str) -> Any:
        real = getattr(self, name)

        def call(*arguments: Any) -> Any:
            self.threads.setdefault(name, set()).add(threading.current_thread().name)
            if self._running:
                self.overlaps.append((self._running, name))
            self._running = name
            try:
                return scripted(*arguments)
            finally:
                self._running = ""

        def scripted(*arguments: Any) -> Any:
            if name == self.hangs_in:
                self.hangs.set()
                self.goes_on.wait()
            if name == self.raises_in:
                raise OSError(5, f"{name} was told to fail")
            return real(*arguments)

        return call

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self.requests.add(req_context.req_id)
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        self.requests.remove(req_context.req_id)

    def lookup(self, key: bytes, req_context: ReqContext) -> LookupResult:
        assert req_context.req_id in self.requests
        if self.unresolved:
            return LookupResult.RETRY
        return LookupResult.HIT if key in self.blocks else LookupResult.MISS

    def submit_store(self, job_metadata: TransferJob) -> None:
        for key, slot in zip(job_metadata.keys, job_metadata.chunk_ids, strict=True):
            self.blocks[key] = bytes(self._primary_kv_view.cast("B")[self._bytes_of(slot)])
        self._results.append(JobResult(job_metadata.job_id, success=True))

    def submit_load(self, job_metadata: TransferJob) -> None:
        if self.held is not None:
            self.held.append(job_metadata)
            return
        self.finish_load(job_metadata)

    def finish_load(self, job: TransferJob) -> None:
        """Write the slots, and report the job at the next poll."""
        loaded = []
        for key, slot in zip(job.keys, job.chunk_ids, strict=True):
            if key not in self.blocks or key in self.failing:
                break
            block = bytes(self._block_size_bytes) if self.lies else self.blocks[key]
            self._primary_kv_view.cast("B")[self._bytes_of(slot)] = block
            loaded.append(key)
        success = len(loaded) == len(job.keys)
        self._results.append(JobResult(job.job_id, success, None if success else tuple(loaded)))

    def _bytes_of(self, slot: int) -> slice:
        start = int(slot) * self._block_size_bytes
        return slice(start, start + self._block_size_bytes)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        results, self._results = self._results + self.extra, []
        self.extra = []
        return results

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        del extra_config
        return {
            COUNTED: OffloadingCounterMetadata(documentation="Jobs.", labelnames=("tier",)),
            SEEN: OffloadingHistogramMetadata(documentation="Sizes.", buckets=(1, 10)),
            "scripted:level": OffloadingGaugeMetadata(documentation="A level."),
        }

    def get_stats(self) -> OffloadingConnectorStats | None:
        reported, self.stats = self.stats, None
        return reported

    @classmethod
    def config_info_keys(cls, tier_config: dict[str, Any]) -> tuple[str, ...]:
        del tier_config
        return ("mood",)

    def config_info(self) -> dict[str, str]:
        return {"mood": "calm"}

    def take_events(self) -> Iterable[OffloadingEvent]:
        removed, self.removed = self.removed, []
        for key in removed:
            del self.blocks[key]
        return [OffloadingEvent(removed, self.medium, removed=True)] if removed else []

    def has_pending_work(self) -> bool:
        return False

    def on_schedule_end(self, context: object) -> None:
        pass

    def drain_jobs(self) -> None:
        for job in self.held or []:
            self.finish_load(job)

    def shutdown(self) -> None:
        pass
