"""The memory backend goes wrong exactly as it is told."""

from __future__ import annotations

from dataclasses import replace

import anyio
import pytest

from kvtier.errors import ConfigError, Misuse, StoreFault
from kvtier.plugin_api.backend import (
    BackendContext,
    LoadBlock,
    Loaded,
    Namespace,
    Outcome,
    StoreBlock,
    block_digest,
)
from kvtier_backends.faults import FaultScript, OperationFaults
from kvtier_backends.memory import MemoryBackend

pytestmark = pytest.mark.anyio
CONTEXT = BackendContext(64, Namespace({}), "0:memory")
KEYS = [bytes([number]) * 4 for number in range(6)]


def make(faults: dict[str, object] | None = None, capacity_bytes: int = 640) -> MemoryBackend:
    options = {"capacity_bytes": capacity_bytes, "faults": faults}
    return MemoryBackend.from_options(options, CONTEXT)


async def store(backend: MemoryBackend, keys: list[bytes]) -> list[Outcome]:
    blocks = []
    for key in keys:
        view = memoryview(key * 16)
        blocks.append(StoreBlock(key, view, block_digest(key, view)))
    return list(await backend.store(blocks))


async def load(backend: MemoryBackend, keys: list[bytes]) -> tuple[list[Loaded], list[bytes]]:
    buffers = [bytearray(64) for _ in keys]
    blocks = [LoadBlock(key, memoryview(one)) for key, one in zip(keys, buffers, strict=True)]
    return list(await backend.load(blocks)), [bytes(one) for one in buffers]


async def outcomes(backend: MemoryBackend, keys: list[bytes]) -> list[Outcome]:
    return [answer.outcome for answer in (await load(backend, keys))[0]]


def test_memory_that_nobody_may_fill_is_refused() -> None:
    with pytest.raises(ConfigError, match="read_only=True leaves it empty"):
        MemoryBackend.from_options({"capacity_bytes": 640}, replace(CONTEXT, read_only=True))


async def test_the_capacity_is_whole_blocks_and_obeyed() -> None:
    backend = make(capacity_bytes=64 * 3 + 63)
    assert backend.traits.capacity_blocks == 3
    assert await store(backend, KEYS[:5]) == [Outcome.DONE] * 3 + [Outcome.FULL] * 2
    assert await store(backend, KEYS[:1]) == [Outcome.DONE]
    await backend.remove(KEYS[:1])
    assert await store(backend, KEYS[4:5]) == [Outcome.DONE]
    assert backend.counters() == {
        "capacity_bytes": 64 * 3,
        "used_bytes": 64 * 3,
        "blocks": 3,
        "stores_full": 2,
    }


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"capacity_bytes": 63}, ["capacity_bytes=63", "raise it"]),
        ({}, ["capacity_bytes is missing"]),
        ({"capacity_bytes": 64, "fault": {}}, ["'fault'", "did you mean 'faults'"]),
        ({"capacity_bytes": 64, "faults": {"lod": {}}}, ["'lod'", "load"]),
        ({"capacity_bytes": 64, "faults": {"load": {"hangs": True}}}, ["'hangs'", "hang"]),
        ({"capacity_bytes": 64, "faults": {"load": {"fail_keys": "xyz"}}}, ["fail_keys", "hex"]),
        ({"capacity_bytes": 64, "faults": []}, ["faults", "mapping"]),
    ],
)
def test_bad_options_are_refused_by_name(options: dict[str, object], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        MemoryBackend.from_options(options, CONTEXT)
    assert all(word in str(caught.value) for word in words), caught.value


async def test_named_keys_and_every_nth_block_fail() -> None:
    backend = make({"load": {"fail_keys": KEYS[1].hex(), "fail_every": 3}})
    await store(backend, KEYS)
    done, failed = Outcome.DONE, Outcome.FAILED
    assert await outcomes(backend, KEYS) == [done, failed, failed, done, done, failed]


async def test_corrupt_blocks_keep_their_digest() -> None:
    """So the layer above can tell, and must."""
    backend = make()
    await store(backend, KEYS[:2])
    backend.faults.load.corrupt_keys = frozenset({KEYS[1]})
    answers, data = await load(backend, KEYS[:2])
    fits = [
        answer.digest == block_digest(key, memoryview(held))
        for key, answer, held in zip(KEYS[:2], answers, data, strict=True)
    ]
    assert fits == [True, False]
    assert [answer.outcome for answer in answers] == [Outcome.DONE] * 2


async def test_errors_are_raised_and_end_when_told() -> None:
    backend = make({"probe": {"error": "cable", "calls_skipped": 1, "calls_max": 1}})
    assert await backend.probe(KEYS[:1]) == [False]
    with pytest.raises(StoreFault, match="cable"):
        await backend.probe(KEYS[:1])
    assert await backend.probe(KEYS[:1]) == [False]
    backend.faults.store = OperationFaults(error=ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        await store(backend, KEYS)


async def test_answers_go_missing_and_stores_find_it_full() -> None:
    backend = make({"store": {"full": True}, "probe": {"answers_missing": 2}})
    assert await store(backend, KEYS[:2]) == [Outcome.FULL] * 2
    assert len(await backend.probe(KEYS)) == 4


@pytest.mark.parametrize("fault", [{"hang": True}, {"delay_s": 1e6}])
async def test_a_hang_ends_with_cancellation_and_nothing_else(fault: dict[str, object]) -> None:
    backend = make({"load": fault})
    await store(backend, KEYS)
    with anyio.move_on_after(0.01) as scope:
        await load(backend, KEYS)
    assert scope.cancelled_caught
    backend.faults = FaultScript()
    assert await outcomes(backend, KEYS) == [Outcome.DONE] * 6


async def test_a_remove_that_fails_leaves_the_block_and_says_so() -> None:
    backend = make({"remove": {"fail_keys": KEYS[0].hex()}})
    await store(backend, KEYS[:2])
    with pytest.raises(StoreFault):
        await backend.remove(KEYS[:2])
    assert await backend.probe(KEYS[:2]) == [True, False]


async def test_a_buffer_of_another_size_is_misuse() -> None:
    with pytest.raises(Misuse):
        await make().load([LoadBlock(KEYS[0], memoryview(bytearray(63)))])
