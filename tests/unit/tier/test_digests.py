"""The driver's digests: the same everywhere, and with or without the GIL as the place asks for."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvtier.plugin_api import backend as port
from kvtier.plugin_api.backend import DIGEST_STEP_BYTES, Outcome, block_digest
from kvtier.plugin_api.slot_memory import SlotMemory
from kvtier.tier import driver_messages as d
from kvtier.tier.backend_driver import FREE_DIGEST_BYTES_MIN, BackendDriver
from kvtier_backends.memory import MemoryBackend

XXHASH_FREES_GIL_BYTES = 100_000


def test_a_digest_does_not_depend_on_its_steps() -> None:
    block = memoryview(bytes(range(251)) * 5000)
    found = {block_digest(b"key", block, step) for step in (1000, 1 << 16, len(block), 1 << 30)}
    assert found == {block_digest(b"key", block)}
    assert block_digest(b"other", block) not in found


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many bytes xxhash was given at a time."""
    given: list[int] = []
    real = port.xxhash.xxh3_128

    class Recording:
        def __init__(self, key: bytes) -> None:
            self._state = real(key)
            self.digest = self._state.digest

        def update(self, some: memoryview) -> None:
            given.append(some.nbytes)
            self._state.update(some)

    monkeypatch.setattr(port.xxhash, "xxh3_128", Recording)
    return given


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("block_bytes", "beside_scheduler", "frees_gil"),
    [
        (FREE_DIGEST_BYTES_MIN, False, True),
        (FREE_DIGEST_BYTES_MIN // 2, False, False),  # to hand the GIL on would take longer
        (8 * FREE_DIGEST_BYTES_MIN, True, False),
    ],
)
async def test_large_blocks_are_digested_without_the_gil_where_no_scheduler_wants_it(
    steps: list[int], block_bytes: int, beside_scheduler: bool, frees_gil: bool
) -> None:
    told: list[Any] = []
    memory = SlotMemory.anonymous(2, block_bytes)
    memory.view(0)[:] = bytes([7]) * block_bytes
    context = port.BackendContext(block_bytes, port.Namespace({}), "1:memory")
    backend = MemoryBackend.from_options({"capacity_bytes": 64 * block_bytes}, context)
    await backend.open()
    driver = BackendDriver(
        "1:memory", backend, memory, told.append, beside_scheduler=beside_scheduler
    )
    batches = (
        d.StoreBatch(batch=1, keys=(b"k" * 32,), slots=(0,), remove=()),
        d.LoadBatch(batch=2, keys=(b"k" * 32,), slots=(1,)),
    )
    for batch in batches:
        async with asyncio.TaskGroup() as tasks:
            driver.begin(tasks)
            driver.receive(batch)
    ends = [message.outcomes for message in told if isinstance(message, d.BatchEnded)]
    assert ends == [(Outcome.DONE,)] * 2
    assert memory.view(1) == memory.view(0)
    if frees_gil:
        assert steps == [block_bytes] * 2
        assert block_bytes > XXHASH_FREES_GIL_BYTES
    else:
        assert max(steps) <= DIGEST_STEP_BYTES < XXHASH_FREES_GIL_BYTES
    driver.stop()
