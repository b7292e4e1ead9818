"""vLLM's own connector, scheduler side, over our manager: no model and no workers.

It asks, allocates, stores and loads as an engine's scheduler has it do. Jobs
complete when the test says so; the bytes stay what they are.
"""

from __future__ import annotations

import uuid
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
)
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock, get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_offload.config import OffloadingGroupConfig
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from kvtier.vllm import KVTierOffloadingSpec
from kvtier.vllm.memory.region import HostRegion
from tests.support.patience import looks
from tests.vllm.support.engine import kvtier_config
from tests.vllm.support.offloading import CONFIG
from tests.vllm.support.play import ours_in_shm

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

BLOCK_TOKENS = 4
BLOCK_BYTES = 4096


class Connector:
    """One engine's scheduler-side connector. ``windows``: one a group, None for full attention."""

    def __init__(self, spec: KVTierOffloadingSpec, windows: Sequence[int | None]) -> None:
        groups = [
            KVCacheGroupSpec([f"layer{number}"], _kv_cache_spec(window))
            for number, window in enumerate(windows)
        ]
        kv_cache_config = KVCacheConfig(1000, [], groups)
        if "cache_hit_alignment_tokens" in KVCacheConfig.__dataclass_fields__:
            kv_cache_config.cache_hit_alignment_tokens = BLOCK_TOKENS
        self.real = OffloadingConnectorScheduler(spec, _vllm_config(), kv_cache_config)
        self.manager: Any = self.real.manager
        self.requests: dict[str, Request] = {}
        self._windows = windows
        self._next_block = 1
        self._finished: set[str] = set()
        self.on_step: Callable[[Sequence[str]], None] = lambda _: None
        """Called at the end of each step with the requests that were scheduled in it."""

    # --- what a scheduler does in a step ---

    def start(self, name: str, prompt: Sequence[int], **params: Any) -> None:
        """Add a request. ``params``: its ``kv_transfer_params``."""
        sampling = SamplingParams(max_tokens=16)
        sampling.extra_args = {"kv_transfer_params": params} if params else None
        request = Request(name, list(prompt), sampling, None, block_hasher=_block_hasher())
        self.requests[name] = request
        self.real.on_new_request(request)

    def matched(self, name: str, computed: int = 0) -> int | None:
        """Ask how many tokens can be loaded; None: ask again in the next step."""
        tokens, _ = self.real.get_num_new_matched_tokens(self.requests[name], computed)
        return tokens

    def load(self, name: str, tokens: int) -> None:
        """Allocate blocks for tokens that were matched, and load them."""
        count = -(-tokens // BLOCK_TOKENS)
        blocks: list[list[KVCacheBlock]] = []
        for window in self._windows:
            skipped = 0 if window is None else max(0, tokens - window + 1) // BLOCK_TOKENS
            null = [KVCacheBlock(0, is_null=True) for _ in range(skipped)]
            fresh = [KVCacheBlock(self._new_block()) for _ in range(count - skipped)]
            blocks.append(null + fresh)
        allocated = KVCacheBlocks(tuple(blocks))
        self.real.update_state_after_alloc(self.requests[name], allocated, tokens)

    def end_step(
        self,
        schedule: Sequence[str] = (),
        *,
        resumed: Sequence[str] = (),
        preempted: Sequence[str] = (),
    ) -> Any:
        """End a step in which these requests compute all their tokens; return its metadata.

        ``preempted``: those that were thrown back since the last step.
        """
        new = [name for name in schedule if name not in resumed]
        scheduled = {name: self.requests[name].num_tokens for name in schedule}
        meta = self.real.build_connector_meta(
            SchedulerOutput(
                scheduled_new_reqs=[self._new_request(name) for name in new],
                scheduled_cached_reqs=self._resumed(resumed),
                num_scheduled_tokens=scheduled,
                total_num_scheduled_tokens=sum(scheduled.values()),
                scheduled_spec_decode_tokens={},
                scheduled_encoder_inputs={},
                num_common_prefix_blocks=[0] * len(self._windows),
                finished_req_ids=self._finished,
                free_encoder_mm_hashes=[],
                **{**_fields_without_default(), "preempted_req_ids": set(preempted)},
            )
        )
        self._finished = set()
        self.on_step(schedule)
        return meta

    def complete(self, *metas: Any) -> None:
        """Let the workers end all jobs of these steps."""
        jobs = [job for meta in metas for job in (*meta.load_jobs, *meta.store_jobs)]
        done = OffloadingWorkerMetadata(completed_jobs=dict.fromkeys(jobs, 1))
        output = KVConnectorOutput(kv_connector_worker_meta=done)
        self.real.update_connector_output(output)

    def finish(self, name: str) -> None:
        """End a request."""
        request = self.requests.pop(name)
        request.status = RequestStatus.FINISHED_ABORTED
        self.real.request_finished(request)
        self._finished.add(name)
        self.complete(self.end_step())

    # --- what tests do with it ---

    def store(self, name: str, prompt: Sequence[int], **params: Any) -> int:
        """Run a request that stores its prompt, in one step; return how many blocks it stored."""
        self.start(name, prompt, **params)
        self.matched(name)
        meta = self.end_step([name])
        stored = sum(len(job.dst_spec.block_ids) for job in meta.store_jobs.values())
        self.complete(meta)
        self.finish(name)
        self.settle()
        return stored

    def match(self, *names: str) -> dict[str, int]:
        """Ask for waiting requests, step by step, until each knows how many tokens it loads."""
        found: dict[str, int] = {}
        for _ in looks(lambda: f"only {found} of {names}"):
            for name in names:
                if name not in found:
                    tokens = self.matched(name)
                    if tokens is not None:
                        found[name] = tokens
                        if tokens:
                            self.load(name, tokens)
            meta = self.end_step([name for name, tokens in found.items() if not tokens])
            self.complete(meta)
            if len(found) == len(names):
                break
        return found

    def settle(self) -> None:
        """End steps until no tier has anything to do."""
        self.until(lambda: self.manager.facade.get_finished() == 0)

    def until(self, reached: Callable[[], bool]) -> None:
        """End empty steps until something is so."""
        for _ in looks():
            if reached():
                return
            self.end_step()

    def primary(self) -> Any:
        """Return the statistics of the primary tier."""
        return self.manager.facade.statistics().primary

    def tier(self, number: int = 0) -> Any:
        """Return the statistics of a secondary tier."""
        return self.manager.facade.statistics().tiers[number]

    def _new_block(self) -> int:
        self._next_block += 1
        return self._next_block

    def _blocks_of(self, name: str) -> tuple[list[int], ...]:
        count = self.requests[name].num_tokens // BLOCK_TOKENS
        return tuple([self._new_block() for _ in range(count)] for _ in self._windows)

    def _new_request(self, name: str) -> NewRequestData:
        self.requests[name].status = RequestStatus.RUNNING
        prompt = list(self.requests[name].prompt_token_ids or ())
        return NewRequestData(name, prompt, [], None, None, self._blocks_of(name), 0, None)

    def _resumed(self, names: Sequence[str]) -> CachedRequestData:
        cached = CachedRequestData.make_empty()
        cached.req_ids += names
        cached.resumed_req_ids.update(names)
        cached.new_block_ids += [self._blocks_of(name) for name in names]
        return cached


@contextmanager
def connector(
    *,
    slots: int,
    windows: Sequence[int | None] = (None,),
    chunk_blocks: int = 1,
    kv_events: bool = False,
    **extra_config: Any,
) -> Iterator[Connector]:
    """Build a connector over a manager with so many slots; shut all down.

    ``chunk_blocks``: vLLM blocks in a block of ours. Tiers run in a thread unless they say
    otherwise: a process takes a second to start, and is nothing to a connector.
    """
    tiers = [{"isolation": "thread", **tier} for tier in extra_config.pop("secondary_tiers", [])]
    config = replace(
        CONFIG,
        enable_kv_cache_events=kv_events,
        groups=tuple(_group(number, window) for number, window in enumerate(windows)),
        worker_kv_bytes_per_block=BLOCK_BYTES,
        cache=replace(CONFIG.cache, tokens_per_hash=BLOCK_TOKENS, blocks_per_chunk=chunk_blocks),
        engine_id=f"test-connector-{uuid.uuid4()}",
        extra_config=kvtier_config(
            cpu_bytes_to_use=slots * chunk_blocks * BLOCK_BYTES,
            secondary_tiers=tiers,
            **extra_config,
        ),
    )
    spec = KVTierOffloadingSpec(config)
    assert spec.slot_count == slots
    region = HostRegion(
        config.engine_id,
        slot_count=slots,
        row_bytes=spec.block_bytes,
        world_size=1,
        rank=0,
    )
    try:
        region.header.publish({"model": "m"})
        built = Connector(spec, windows)
        try:
            yield built
        finally:
            built.real.shutdown()
    finally:
        region.close()
        assert ours_in_shm(config.engine_id) == []


def _group(number: int, window: int | None) -> OffloadingGroupConfig:
    given: dict[str, Any] = {}
    if "sliding_window_size_in_chunks" in OffloadingGroupConfig.__dataclass_fields__:  # vLLM 0.33
        given["sliding_window_size_in_chunks"] = window and -(-window // BLOCK_TOKENS)
    return OffloadingGroupConfig(BLOCK_TOKENS, (f"layer{number}",), number, **given)


def _kv_cache_spec(window: int | None) -> FullAttentionSpec | SlidingWindowSpec:
    shape: dict[str, Any] = {
        "block_size": BLOCK_TOKENS,
        "num_kv_heads": 1,
        "head_size": 8,
        "dtype": torch.float16,
    }
    if window is None:
        return FullAttentionSpec(**shape)
    return SlidingWindowSpec(sliding_window=window, **shape)


def _fields_without_default() -> dict[str, Any]:
    """Return what else ``SchedulerOutput`` must be given: releases differ."""
    from dataclasses import MISSING, fields

    ours = {
        "scheduled_new_reqs",
        "scheduled_cached_reqs",
        "num_scheduled_tokens",
        "total_num_scheduled_tokens",
        "scheduled_spec_decode_tokens",
        "scheduled_encoder_inputs",
        "num_common_prefix_blocks",
        "finished_req_ids",
        "free_encoder_mm_hashes",
    }
    return {
        each.name: None
        for each in fields(SchedulerOutput)
        if each.default is MISSING and each.default_factory is MISSING and each.name not in ours
    }


@cache
def _vllm_config() -> VllmConfig:
    config = VllmConfig()
    with set_current_vllm_config(config):
        return config


@cache
def _block_hasher() -> Any:
    init_none_hash(sha256_cbor)
    return get_request_block_hasher(BLOCK_TOKENS, sha256_cbor)
