"""vLLM's own tiering manager with one of kvtier's tiers behind it; the test plays the GPU."""

from __future__ import annotations

import hashlib
import uuid
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np
from vllm.v1.kv_offload.base import LookupResult
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvtier.vllm.identity import own_spec
from stress.bench.sides import NOTHING_NEW, make_context
from tests.support.patience import PATIENCE_S, pause, until
from tests.vllm.support.engine import PATIENT
from tests.vllm.support.offloading import CONFIG
from tests.vllm.support.play import ours_in_shm

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

BLOCK = CONFIG.worker_kv_bytes_per_block
UNDECIDED = {LookupResult.RETRY, LookupResult.HIT_PENDING}


def disk(path: Path, blocks: int = 512, **options: Any) -> dict[str, Any]:
    return {
        "type": "disk",
        "path": str(path),
        "capacity_bytes": 2 * blocks * BLOCK,
        "isolation": "thread",
        **options,
    }


def memory(**faults: Any) -> dict[str, Any]:
    """Return a tier in memory, with these faults: ``load={"hang": True}``."""
    return {"type": "memory", "capacity_bytes": 64 << 20, "faults": faults}


def entry(tier: Mapping[str, Any], **options: Any) -> dict[str, Any]:
    """Return what a user writes into ``secondary_tiers``."""
    return {
        "type": "KVTierSecondaryTier",
        "module_path": "kvtier.vllm",
        "tier": {**PATIENT, **tier},
        **options,
    }


def bytes_of(key: bytes) -> np.ndarray[Any, Any]:
    """Return what the GPU computes for a block."""
    digest = hashlib.blake2b(key, digest_size=64).digest()
    return np.frombuffer(digest * (BLOCK // 64), dtype=np.int8)


class Tiering:
    """A manager, and what its GPU side does."""

    def __init__(self, manager: Any) -> None:
        self.manager = manager
        self.tier = manager.secondary_tiers[0]
        self.view = np.asarray(manager.primary_tier.get_kv_memoryview())
        self.requests = 0

    def begin(self, keys: Sequence[bytes]) -> Any:
        """Begin a request with these keys; return its context."""
        self.requests += 1
        context = make_context(f"r{self.requests}", keys)
        self.manager.on_new_request(context)
        return context

    def step(self) -> None:
        """End a step of the scheduler."""
        self.manager.on_schedule_end(NOTHING_NEW)

    def settle(self) -> None:
        """Step until no job runs."""

        def rests() -> bool:
            self.step()
            return not self.manager.has_pending_work()

        until(rests)

    def store(self, keys: Sequence[bytes], *, settles: bool = True) -> None:
        """Compute blocks and store them in the primary tier, from which they go on."""
        context = self.begin(keys)
        self.store_as(context, keys)
        self.manager.on_request_finished(context)
        if settles:
            self.settle()

    def store_as(self, context: Any, keys: Sequence[bytes]) -> None:
        """Do so for a request that runs on."""
        output = self.manager.prepare_store(keys, context)
        assert output is not None, "no room in the primary tier"
        for key, slot in zip(output.keys_to_store, output.store_spec.chunk_ids, strict=True):
            self.view[slot] = bytes_of(key)
        if output.keys_to_store:
            self.manager.complete_store(output.keys_to_store, context)

    def look_up(self, keys: Sequence[bytes], context: Any) -> list[LookupResult]:
        """Ask once for all keys, and end the step."""
        found = [self.manager.lookup(key, context) for key in keys]
        self.step()
        return found

    def find(self, keys: Sequence[bytes], context: Any) -> list[LookupResult]:
        """Ask in one step after the other until each key is known to be there, or not."""
        for _ in range(int(PATIENCE_S / 0.005)):
            found = self.look_up(keys, context)
            if not UNDECIDED.intersection(found):
                return found
            pause()
        raise AssertionError(f"undecided for ever: {found}")

    def load(self, keys: Sequence[bytes]) -> int:
        """Load what is found; return how many blocks. They are what was stored, or this fails."""
        context = self.begin(keys)
        found = self.find(keys, context)
        hits = [key for key, each in zip(keys, found, strict=True) if each is LookupResult.HIT]
        if hits:
            spec = self.manager.prepare_load(hits, context)
            for key, slot in zip(hits, spec.chunk_ids, strict=True):
                assert np.array_equal(self.view[slot], bytes_of(key)), "wrong bytes"
            self.manager.complete_load(hits, context)
        self.manager.on_request_finished(context)
        return len(hits)

    def reset(self) -> None:
        """Do what vLLM does at a reset of the connector."""
        self.manager.reset_cache()
        if hasattr(self.manager, "on_reset_flushed"):  # vLLM 0.33
            self.manager.on_reset_flushed()


@contextmanager
def tiering(
    tier: Mapping[str, Any],
    *,
    slots: int = 8,
    facts: Any = None,
    events: bool = False,
    **options: Any,
) -> Iterator[Tiering]:
    """Build vLLM's spec and manager with this tier; shut it down, and look what is left."""
    config = replace(
        CONFIG,
        engine_id=f"test-own-{uuid.uuid4()}",
        enable_kv_cache_events=events,
        extra_config={
            "spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": slots * BLOCK,
            "secondary_tiers": [entry(tier, **options)],
        },
    )
    with patch.object(own_spec, "engine_facts", lambda *_: facts or {"model": "m"}):
        manager = TieringOffloadingSpec(config).get_manager()
    running = Tiering(manager)
    try:
        yield running
    finally:
        del running.view
        manager.shutdown()
        assert ours_in_shm(config.engine_id) == []
