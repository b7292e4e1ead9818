"""What an earlier block left in a slot, behind a shorter one, is no tier's to see."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, cast

import pytest

from kvtier.plugin_api.backend import BackendContext, BackendTraits, Namespace, Outcome
from kvtier.plugin_api.slot_memory import SlotMemory
from kvtier.tier import driver_messages as d
from kvtier.tier.backend_driver import BackendDriver
from kvtier_backends.memory import MemoryBackend

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtier.plugin_api.backend import StoreBlock

BLOCK = 4096
KEY = b"k" * 32 + (1).to_bytes(4, "big")
OWN, LEFT = b"o" * 1000, b"left" * 774


class Handed(MemoryBackend):
    """A memory tier that keeps what it was handed."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.bytes: list[bytes] = []

    async def store(self, blocks: Sequence[StoreBlock]) -> Sequence[Outcome]:
        self.bytes += [bytes(block.buffer) for block in blocks]
        return await super().store(blocks)


@pytest.mark.anyio
@pytest.mark.parametrize("request_scoped", [False, True])
async def test_a_backend_is_handed_zeros_where_a_block_of_a_smaller_group_ends(
    request_scoped: bool,
) -> None:
    slots = bytearray((OWN + LEFT) * 2)
    memory = SlotMemory(memoryview(slots), 2, BLOCK, rests={KEY[-4:]: [(len(OWN), BLOCK)]})
    context = BackendContext(BLOCK, Namespace({}), "1:memory")
    backend = Handed.from_options({"capacity_bytes": 64 * BLOCK}, context)
    assert isinstance(backend, Handed)
    if request_scoped:
        backend.traits = BackendTraits(1, 1, request_scoped=True)
    await backend.open()
    told: list[Any] = []
    driver = BackendDriver("1:memory", backend, memory, told.append)
    driver.requests.want("r", (KEY,), cast("Any", backend))
    batches = [d.StoreBatch(batch=1, request="r", keys=(KEY,), slots=(0,), remove=())]
    if not request_scoped:
        batches.append(d.LoadBatch(batch=2, keys=(KEY,), slots=(1,)))
    for batch in batches:
        async with asyncio.TaskGroup() as tasks:
            driver.begin(tasks)
            driver.receive(batch)
    driver.stop()
    assert backend.bytes == [OWN + bytes(len(LEFT))]
    ends = [message.outcomes for message in told if isinstance(message, d.BatchEnded)]
    assert ends == [(Outcome.DONE,)] * len(batches)
