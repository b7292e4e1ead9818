"""Records the engine's requests (``record``): kvtier's manager, with a recorder behind it.

It is a class of its own, so that an engine that records nothing pays nothing. vLLM's request comes
from the connector's hook (``workarounds/connector_hooks.py``), each time that vLLM looks it up; the
last lookup before it loads or runs counts.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from kvtier.core.metrics import PRIMARY_TIER
from kvtier.engine.link.tier_health import TierRecord
from kvtier.errors import ConfigError
from kvtier.recording.recorder import EventKind, Happened, Record, Recorder, TierWork
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


class _Asked:
    """One request from its first lookup to its end."""

    __slots__ = ("ended_s", "gpu_tokens", "loaded", "request", "sources", "started_s")

    def __init__(self, request: Any) -> None:  # noqa: ANN401 - vLLM's
        self.request = request
        self.gpu_tokens = 0
        self.started_s: float | None = None
        self.ended_s: float | None = None  # its last token; vLLM reports the end a step later
        self.loaded: Sequence[bytes] = ()
        self.sources: Mapping[bytes, int] = {}


class WatchedWork:
    """Finds when a tier did no work of one kind: from its last success to its last failure.

    A fault shows only when work fails, some time after the tier got it. So the fault counts as
    begun at the last success before that.
    """

    __slots__ = ("_is_down", "_seen", "_since", "_until")

    def __init__(self) -> None:
        self._seen = TierRecord(0, 0, is_bypassed=False)
        self._since = self._until = time.time()
        self._is_down = False

    def look(self, record: TierRecord, now: float) -> tuple[float, EventKind] | None:
        """Return when the tier went down or came up, if the record shows it now, and which."""
        seen, self._seen = self._seen, record
        if record.is_bypassed or record.failed > seen.failed:
            was_down, self._is_down, self._until = self._is_down, True, now
            return None if was_down else (self._since, "tier_down")
        if record.worked == seen.worked:
            return None
        was_down, self._is_down, self._since = self._is_down, False, now
        return (self._until, "tier_up") if was_down else None


def open_recorder(config: RuntimeConfig, spec: OffloadingSpec) -> Recorder | None:
    """Return the recorder, if the configuration has one. Raises ``ConfigError``."""
    if config.record is None:
        return None
    problem = None
    if len(spec.config.groups) > 1:
        problem = "the model has several KV-cache groups, which kvtier replay does not support"
    elif not HAS_POSITIONS:
        problem = "this vLLM does not publish the keys of a request"
    if problem is not None:
        raise ConfigError(f"record={config.record!r} cannot be used: {problem}. Remove the key.")
    return Recorder(
        config.record,
        config.record_bytes_max,
        block_tokens=spec.config.groups[0].tokens_per_block * int(spec.blocks_per_chunk),
        tiers=[PRIMARY_TIER, *(tier.name for tier in config.tiers)],
    )


class RecordingManager(KVTierManager):
    """One engine's manager that records requests. Scheduler thread only."""

    def record_to(self, recorder: Recorder) -> None:
        """Begin to record. Once, before the first request."""
        self._recorder = recorder
        self._asked: dict[str, _Asked] = {}
        self._watched: list[tuple[int, TierWork, WatchedWork]] = [
            (number, work, WatchedWork())
            for number in range(len(self._tiers))
            for work in ("loads", "stores")
        ]
        self._metrics.count_records(lambda: recorder.dropped)
        recorder.start()

    def on_request_matched(self, request: Any, gpu_tokens: int) -> None:  # noqa: ANN401 - vLLM's
        """Note how many tokens of a waiting request vLLM's own prefix cache has."""
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
        self._note_tiers()

    def _note_tiers(self) -> None:
        """Record when tiers went down, and when they came up."""
        for tier, work, watched in self._watched:
            seen = self.facade.tier_record(tier, stores=work == "stores")
            happened = watched.look(seen, time.time())
            if happened is not None:
                self._recorder.add(Happened(*happened, tier, work))

    @override
    def reset_cache(self) -> None:
        self._recorder.add(Happened(time.time(), "reset"))
        super().reset_cache()

    @override
    def on_request_ends(self, request: Any) -> dict[str, Any] | None:
        asked = self._asked.get(request.request_id)
        if asked is not None:
            asked.ended_s = time.time()
        return super().on_request_ends(request)

    @override
    def on_request_finished(self, req_context: ReqContext) -> None:
        asked = self._asked.pop(req_context.req_id, None)
        if asked is not None:
            keys, request = positions_of(req_context), asked.request
            record = Record(
                arrived_s=request.arrival_time,
                started_s=asked.started_s,
                ended_s=asked.ended_s or time.time(),
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
        self._recorder.begin_to_close()  # it shares the tiers' time limit, and ends beside them
        super().shutdown()
        self._recorder.close(max(0.0, until - time.monotonic()))
