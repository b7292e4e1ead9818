"""The driver's digests: the same everywhere, and with or without the GIL as the place asks for."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import pytest

from kvtier.plugin_api import backend as port
from kvtier.plugin_api.backend import DIGEST_STEP_BYTES, Outcome, block_digest
from kvtier.plugin_api.slot_memory import SlotMemory
from kvtier.tier import driver_messages as d
from kvtier.tier.backend_driver import FREE_DIGEST_BYTES_MIN, BackendDriver
from kvtier_backends.memory import MemoryBackend

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

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


class ReadingBackend(MemoryBackend):
    """Fills the buffers in a thread, which reports each block; then may still change them."""

    threads: list[int]
    afterwards: Callable[[memoryview], object] = staticmethod(lambda _buffer: None)

    async def load(self, blocks: Sequence[port.LoadBlock]) -> list[port.Loaded]:
        loaded = list(await super().load(blocks))

        def read() -> None:
            self.threads.append(threading.get_ident())
            for block in blocks:
                self.afterwards(block.buffer)
                assert block.on_read is not None
                block.on_read()

        await asyncio.to_thread(read)
        return loaded


@pytest.mark.anyio
async def test_a_thread_that_has_read_a_block_may_compute_its_digest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only there are the bytes in the processor's cache. The comparison stays the driver's."""
    told: list[Any] = []
    computed: list[int] = []
    digest = port.block_digest

    def recording(key: bytes, buffer: memoryview, step_bytes: int) -> bytes:
        computed.append(threading.get_ident())
        return digest(key, buffer, step_bytes)

    monkeypatch.setattr("kvtier.tier.backend_driver.block_digest", recording)
    memory = SlotMemory.anonymous(2, FREE_DIGEST_BYTES_MIN)
    memory.view(0)[:] = bytes([7]) * FREE_DIGEST_BYTES_MIN
    context = port.BackendContext(FREE_DIGEST_BYTES_MIN, port.Namespace({}), "1:memory")
    capacity = {"capacity_bytes": 64 * FREE_DIGEST_BYTES_MIN}
    backend = ReadingBackend.from_options(capacity, context)
    assert isinstance(backend, ReadingBackend)
    backend.threads = []
    await backend.open()
    driver = BackendDriver("1:memory", backend, memory, told.append, beside_scheduler=False)

    async def outcome_of(message: d.StoreBatch | d.LoadBatch) -> Outcome:
        async with asyncio.TaskGroup() as tasks:
            driver.begin(tasks)
            driver.receive(message)
        return told[-1].outcomes[0]

    key = (b"k" * 32,)
    assert await outcome_of(d.StoreBatch(1, key, (0,), ())) is Outcome.DONE
    computed.clear()
    assert await outcome_of(d.LoadBatch(2, key, (1,))) is Outcome.DONE
    assert computed == backend.threads, "once, by the thread that read it"

    def damage(buffer: memoryview) -> None:
        buffer[-1] ^= 1

    backend.afterwards = damage
    assert await outcome_of(d.LoadBatch(3, key, (1,))) is Outcome.DAMAGED
    driver.stop()
