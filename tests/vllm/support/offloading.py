"""What vLLM hands to an offloading spec: one engine, one rank, one group of two layers."""

from __future__ import annotations

from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)

CONFIG = OffloadingConfig(
    groups=(OffloadingGroupConfig(tokens_per_block=32, layer_names=("a", "b"), group_id=0),),
    worker_kv_bytes_per_block=8192,
    enable_kv_cache_events=False,
    extra_config={},
    engine_id="e",
    model=OffloadingModelConfig(name="org/model", dtype="float16"),
    cache=OffloadingCacheConfig(tokens_per_hash=32, blocks_per_chunk=1),
    parallel=OffloadingParallelConfig(
        rank=0,
        world_size=1,
        tp_size=1,
        pp_size=1,
        pcp_size=1,
        dcp_size=1,
        data_parallel_index=0,
        data_parallel_size=1,
        data_parallel_rank_local=0,
        is_parallelism_agnostic=True,
    ),
    kv_cache_layout="LBHNC",
)
