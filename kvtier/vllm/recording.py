"""Records the engine's requests (``record``): kvtier's manager, with a recorder behind it.

A class of its own, so that an engine that records nothing pays nothing. What a request asked is
known from vLLM's request, which the connector's hook passes on (``workarounds/connector_hooks.py``)
each time that vLLM looks the request up; what counts is the last lookup before it loads or runs.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

from typing_extensions import override

from kvtier.errors import ConfigError
from kvtier.recording.recorder import Record, Recorder
from kvtier.vllm.releases import HAS_POSITIONS, positions_of
from kvtier.vllm.scheduler.manager import KVTierManager

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from vllm.v1.kv_offload.base import (
        LoadStoreSpec,
        OffloadingSpec,
        ReqContext,
        ScheduleEndContext,
    )

    from kvtier.settings.runtime_config import RuntimeConfig

PRIMARY: Final = "0:primary"


class _Asked:
    """One request from its first lookup to its end."""

    __slots__ = ("gpu_tokens", "loaded", "request", "sources", "started_s")

    def __init__(self, request: Any) -> None:  # noqa: ANN401 - vLLM's
        self.request = request
        self.gpu_tokens = 0
        self.started_s: float | None = None
        self.loaded: Sequence[bytes] = ()
        self.sources: Mapping[bytes, int] = {}


def open_recorder(config: RuntimeConfig, spec: OffloadingSpec) -> Recorder | None:
    """Return the recorder, if the configuration has one. Raises ``ConfigError``."""
    if config.record is None:
        return None
    problem = None
    if len(spec.config.groups) > 1:
        problem = "the model has several KV-cache groups, which kvtier replay does not know"
    elif not HAS_POSITIONS:
        problem = "this vLLM does not publish the keys of a request"
    if problem is not None:
        raise ConfigError(f"record={config.record!r} cannot be used: {problem}. Remove the key.")
    return Recorder(
        config.record,
        config.record_bytes_max,
        block_tokens=spec.config.groups[0].tokens_per_block * int(spec.blocks_per_chunk),
        tiers=[PRIMARY, *(tier.name for tier in config.tiers)],
    )


class RecordingManager(KVTierManager):
    """One engine's manager that records requests. Scheduler thread only."""

    def record_to(self, recorder: Recorder) -> None:
        """Begin to record. Once, before the first request."""
        self._recorder = recorder
        self._asked: dict[str, _Asked] = {}
        self._metrics.count_records(lambda: recorder.dropped)
        recorder.start()

    def on_request_matched(self, request: Any, gpu_tokens: int) -> None:  # noqa: ANN401 - vLLM's
        """Note what vLLM's own prefix cache has of a request that waits."""
        asked = self._asked.get(request.request_id)
        if asked is None:
            asked = self._asked[request.request_id] = _Asked(request)
        if asked.started_s is None:  # else it was preempted
            asked.gpu_tokens = gpu_tokens

    @override
    def prepare_load(self, keys: Collection[bytes], req_context: ReqContext) -> LoadStoreSpec:
        asked = self._asked.get(req_context.req_id)
        if asked is not None and asked.started_s is None:
            asked.started_s = time.time()
            asked.loaded = list(keys)
            asked.sources = dict(self.facade.load_sources(req_context.req_id))
        return super().prepare_load(keys, req_context)

    @override
    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        for name in context.new_req_ids:
            asked = self._asked.get(name)
            if asked is not None and asked.started_s is None:
                asked.started_s = time.time()
        super().on_schedule_end(context)

    @override
    def on_request_finished(self, req_context: ReqContext) -> None:
        asked = self._asked.pop(req_context.req_id, None)
        if asked is not None:
            keys, request = positions_of(req_context), asked.request
            record = Record(
                arrived_s=request.arrival_time,
                started_s=asked.started_s,
                ended_s=time.time(),
                tokens=request.num_prompt_tokens,
                output_tokens=request.num_output_tokens,
                gpu_tokens=asked.gpu_tokens,
                loaded=asked.loaded,
                sources=asked.sources,
                keys=keys,
            )
            self._recorder.add(record, len(keys))
        super().on_request_finished(req_context)

    @override
    def shutdown(self) -> None:
        until = time.monotonic() + self._close_timeout_s
        self._recorder.begin_to_close()  # while the tiers end, which have the same time
        super().shutdown()
        self._recorder.close(max(0.0, until - time.monotonic()))
