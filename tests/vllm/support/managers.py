"""A manager without an engine: built as vLLM does, called by the test."""

from __future__ import annotations

import uuid
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvtier.vllm import KVTierOffloadingSpec
from kvtier.vllm.memory.region import HostRegion
from tests.vllm.support.engine import kvtier_config
from tests.vllm.support.offloading import CONFIG
from tests.vllm.support.play import ours_in_shm

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def manager(*, facts: Any = None, **extra_config: Any) -> Iterator[Any]:
    """Build spec and manager beside a worker that has mapped the memory; shut all down.

    ``facts``: what the worker tells of the model.
    """
    config = replace(
        CONFIG,
        engine_id=f"test-manager-{uuid.uuid4()}",
        extra_config=kvtier_config(**{"cpu_bytes_to_use": 1 << 20, **extra_config}),
    )
    spec = KVTierOffloadingSpec(config)
    region = HostRegion(
        config.engine_id,
        slot_count=spec.slot_count,
        row_bytes=spec.block_bytes,
        world_size=1,
        rank=0,
    )
    try:
        region.header.publish(facts or {"model": "m"})
        built = spec.get_manager()
        try:
            yield built
        finally:
            built.shutdown()
    finally:
        region.close()
        assert ours_in_shm(config.engine_id) == []
