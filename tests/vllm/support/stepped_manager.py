"""A manager over actors in the test cell: real but for its tiers, whose answers the test gives."""

from __future__ import annotations

import uuid
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_offload.base import ReqContext, ScheduleEndContext, make_offload_key

from kvtier.plugin_api.backend import BackendTraits, Outcome
from kvtier.plugin_api.slot_memory import SlotMemory
from kvtier.policies.eviction.lru import LRUPolicy
from kvtier.settings.extra_config import read_settings
from kvtier.vllm import KVTierOffloadingSpec
from kvtier.vllm.memory.group_kinds import GroupKind
from kvtier.vllm.memory.region import HostRegion
from kvtier.vllm.scheduler.manager import KVTierManager
from tests.support.cell import open_test_runtime
from tests.vllm.support.engine import kvtier_config
from tests.vllm.support.offloading import CONFIG

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from tests.support.cell import Batch

CHUNK_TOKENS = 32
FS = {"type": "fs", "root_dir": "/nowhere"}
MEMORY = {"type": "memory", "capacity_bytes": 1 << 20}


def keys(text: str, group: int = 0) -> list[bytes]:
    """Return a key for each letter."""
    return [make_offload_key(letter.encode() * 32, group) for letter in text]


def context(name: str, order: Sequence[bytes] = (), **params: Any) -> ReqContext:
    """Return a request whose keys end at one chunk after the other; groups have the same ends."""
    made = ReqContext(req_id=name, kv_transfer_params=params or None)
    ends: dict[bytes, int] = {}
    for key in order:
        ends[key[-4:]] = ends.get(key[-4:], 0) + CHUNK_TOKENS
        made.set_offload_key_position(key, ends[key[-4:]])
    return made


class SteppedManager:
    """What vLLM's connector does with a manager, and what tiers answer."""

    def __init__(
        self,
        slots: int,
        tiers: Sequence[dict[str, Any]],
        groups: int,
        pp_size: int,
        chunk_blocks: int,
        **extra: Any,
    ) -> None:
        self.now = 0.0
        extra_config = kvtier_config(secondary_tiers=list(tiers), **extra)
        group = CONFIG.groups[0]
        spec = KVTierOffloadingSpec(
            replace(
                CONFIG,
                engine_id=f"test-stepped-{uuid.uuid4()}",
                extra_config=extra_config,
                groups=tuple(replace(group, group_id=number) for number in range(groups)),
                parallel=replace(CONFIG.parallel, pp_size=pp_size),
                cache=replace(CONFIG.cache, blocks_per_chunk=chunk_blocks),
            )
        )
        kind = GroupKind(1) if groups == 1 else GroupKind()  # a window alone, or full attention
        spec.on_groups_known({keys("A", number)[0][-4:]: kind for number in range(groups)})
        config = read_settings(extra_config, slot_count=slots, block_bytes=4096)
        self.runtime = open_test_runtime(
            config, LRUPolicy(slots), [(BackendTraits(1, 1), None)] * len(tiers), clock=self.clock
        )
        self.region = HostRegion(
            spec.config.engine_id, slot_count=slots, row_bytes=4096, world_size=1, rank=None
        )
        self.facade = self.runtime.facade
        self.manager = KVTierManager(
            self.facade,
            config,
            spec,
            KVTierOffloadingSpec.metrics(extra_config),
            SlotMemory.anonymous(slots, 4096),
            self.region,
        )

    def clock(self) -> float:
        """Return what time it is."""
        return self.now

    def start(self, made: ReqContext) -> ReqContext:
        """Begin a request."""
        self.manager.on_new_request(made)
        return made

    def store(self, name: str, stored: Sequence[bytes]) -> None:
        """Have a request store blocks, and tiers take them, unless there is none."""
        made = self.start(context(name, stored))
        output = self.manager.prepare_store(stored, made)
        assert output is not None
        self.manager.complete_store(set(output.keys_to_store), made)
        self.manager.on_request_finished(made)
        self.answer()
        self.step()

    def evict(self) -> None:
        """Store as many other blocks as there are slots: tiers alone have those of before."""
        slots = self.runtime.primary.slots.count
        self.store("other", [bytes([200 + n]) * 32 + bytes(4) for n in range(slots)])

    def step(self, new: Collection[str] = (), preempted: Collection[str] = ()) -> None:
        """End a step in which these requests run for the first time, or are preempted."""
        self.manager.on_schedule_end(ScheduleEndContext(list(new), list(preempted)))

    def answer(self, outcome: Outcome = Outcome.DONE) -> list[Batch]:
        """Have tiers answer all that they were asked."""
        answered: list[Batch] = []
        self.runtime.cell.settle()
        for tier in self.runtime.tiers:
            while tier.batches:
                batch = tier.batches[0]
                tier.answer(batch, [outcome] * len(batch.keys))
                answered.append(batch)
                self.runtime.cell.settle()
        return answered

    def promotion_slots(self) -> int:
        """Return how many slots promotions hold."""
        return self.facade.statistics().primary.promotion_slots

    def promote(self, name: str, wanted: Sequence[bytes]) -> ReqContext:
        """Begin a request, and have a tier deliver blocks for it until all are there."""
        made = self.start(context(name, wanted))
        for _ in range(3):
            for key in wanted:
                self.manager.lookup(key, made)
            self.step()
            self.answer()
        return made


@contextmanager
def stepped(
    *,
    slots: int = 8,
    tiers: Sequence[dict[str, Any]] = (),
    groups: int = 1,
    pp_size: int = 1,
    chunk_blocks: int = 1,
    **extra: Any,
) -> Iterator[SteppedManager]:
    """Build a manager; shut it down."""
    made = SteppedManager(slots, tiers, groups, pp_size, chunk_blocks, **extra)
    try:
        yield made
    finally:
        made.manager.shutdown()
        made.region.close()
