"""Memory of encrypted blocks in transit: limited, in order, and touched once."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

import pytest

from kvtier.plugin_api.backend import LoadBlock, Loaded, Outcome
from kvtier_backends.disk.encryption.encrypted_log import EncryptedLog
from kvtier_backends.disk.encryption.transit_memory import TRANSIT_BYTES_MAX, TransitMemory
from kvtier_backends.encryption.cipher import BlockCipher
from kvtier_backends.encryption.keys import parse_keys_untrusted

if TYPE_CHECKING:
    from collections.abc import Sequence

pytestmark = pytest.mark.anyio

BLOCK_BYTES = 1 << 20


class Calls:
    """Calls that hold memory until they are ended."""

    def __init__(self) -> None:
        keyring = parse_keys_untrusted("ab" * 32)
        cipher = BlockCipher(keyring, b"n" * 16, BLOCK_BYTES, kept_bytes_max=TRANSIT_BYTES_MAX)
        self.fit = TRANSIT_BYTES_MAX // cipher.borrowed_bytes  # blocks
        self.running: dict[str, asyncio.Event] = {}
        self.lent: list[object] = []  # kept: another object of the same number is another one
        self.transit = TransitMemory(cipher)

    async def call(self, name: str, blocks: int) -> None:
        async with self.transit.borrow(blocks) as memory:
            assert len({id(each.obj) for each in memory}) == blocks
            self.lent += [each.obj for each in memory]
            self.running[name] = asyncio.Event()
            try:
                await self.running[name].wait()
            finally:
                del self.running[name]

    async def begin(self, name: str, blocks: int) -> asyncio.Task[None]:
        task = asyncio.create_task(self.call(name, blocks))
        await settled()
        return task


def ids(memory: Sequence[object]) -> set[int]:
    return {id(each) for each in memory}


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_calls_wait_in_their_order_for_the_memory_of_others() -> None:
    calls = Calls()
    tasks = [
        await calls.begin("half", calls.fit // 2),
        await calls.begin("all", calls.fit),
        await calls.begin("small", 1),
    ]
    assert list(calls.running) == ["half"], "a small call overtakes none that waits"
    calls.running["half"].set()
    await settled()
    assert list(calls.running) == ["all"]
    calls.running["all"].set()
    await settled()
    assert list(calls.running) == ["small"]
    calls.running["small"].set()
    await asyncio.gather(*tasks)


async def test_a_call_that_is_larger_than_the_limit_goes_alone() -> None:
    calls = Calls()
    tasks = [await calls.begin("small", 1), await calls.begin("huge", calls.fit + 1)]
    assert list(calls.running) == ["small"]
    calls.running["small"].set()
    await settled()
    assert list(calls.running) == ["huge"]
    tasks.append(await calls.begin("next", 1))
    assert list(calls.running) == ["huge"]
    calls.running["huge"].set()
    await settled()
    calls.running["next"].set()
    await asyncio.gather(*tasks)


async def test_cancelled_calls_leave_their_room_to_others() -> None:
    calls = Calls()
    holding = calls.transit.borrow(calls.fit)
    await holding.__aenter__()
    waiting = await calls.begin("waiting", 1)
    woken = await calls.begin("woken", 1)
    last = await calls.begin("last", calls.fit)
    waiting.cancel()
    await settled()
    await holding.__aexit__(None, None, None)  # waits for nothing: no call has gone on by now
    woken.cancel()
    with suppress(asyncio.CancelledError):
        await woken
    await settled()
    assert list(calls.running) == ["last"]
    calls.running["last"].set()
    await last


async def test_memory_is_lent_again_but_not_after_an_error() -> None:
    """A thread may still use that of a call that ended early."""
    calls = Calls()
    first = await calls.begin("first", 4)
    calls.running["first"].set()
    await first
    again = await calls.begin("again", 4)
    assert ids(calls.lent[4:]) == ids(calls.lent[:4])
    again.cancel()
    with suppress(asyncio.CancelledError):
        await again
    third = await calls.begin("third", 4)
    assert ids(calls.lent[8:]).isdisjoint(ids(calls.lent[:8]))
    calls.running["third"].set()
    await third


class HungLog:
    """A log on a disk that answers nothing any more."""

    async def load(self, _blocks: object, _encryption: object) -> list[Loaded]:
        await asyncio.Event().wait()
        raise AssertionError


class EmptyLog:
    """The log of the folder that is used instead."""

    async def load(self, blocks: Sequence[LoadBlock], _encryption: object) -> list[Loaded]:
        return [Loaded(Outcome.ABSENT)] * len(blocks)


async def test_calls_that_hang_in_a_folder_that_is_gone_keep_no_memory_from_its_successor() -> None:
    keyring = parse_keys_untrusted("ab" * 32)
    encrypted = EncryptedLog(BlockCipher(keyring, b"n" * 16, BLOCK_BYTES), "t")
    buffer = memoryview(bytearray(BLOCK_BYTES))
    blocks = [LoadBlock(bytes([number]), buffer) for number in range(Calls().fit)]
    hung, successor = HungLog(), cast("Any", EmptyLog())
    hanging = asyncio.create_task(encrypted.load(cast("Any", hung), blocks))
    await settled()
    loading = asyncio.create_task(encrypted.load(successor, blocks))
    await settled()
    assert loading.done()
    assert await loading == [Loaded(Outcome.ABSENT)] * len(blocks)
    hanging.cancel()
    with suppress(asyncio.CancelledError):
        await hanging
