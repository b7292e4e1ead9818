"""Provides the tools of the conformance checks: a backend opened on slots, and blocks in them."""

from __future__ import annotations

import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Final, NamedTuple

import anyio

from kvtier.plugin_api.backend import (
    Backend,
    BackendContext,
    Connection,
    LoadBlock,
    Loaded,
    Namespace,
    Outcome,
    StoreBlock,
    block_digest,
)
from kvtier.plugin_api.slot_memory import SlotMemory
from kvtier.testing._run_clock import RunClock

MakeBackend = Callable[[BackendContext], Backend]
"""Builds a backend, not yet opened, for the context it is given.

Every call must reach the same storage: two backends for equal contexts are
the ones of an engine before and after a restart. There must be room for
``BLOCKS_MIN`` blocks, and, if ``traits.capacity_blocks`` is set, for no more
than ``BLOCKS_MAX``. Raising ``ConfigError`` refuses a block size.
"""

BackendCheck = Callable[[MakeBackend], Awaitable[None]]
"""One check: raises ``NotConforming``, which names the broken promise."""

BLOCK_BYTES: Final = 16 * 1024
BLOCKS_MIN: Final = 64
BLOCKS_MAX: Final = 512
GROUP: Final = (0).to_bytes(4, "big")
clock: Callable[[], float] = RunClock()  #: in seconds; tests of the suite replace it
random_data: Callable[[int], bytes] = os.urandom  #: of a block; some tests have data that shrink
CLOSE_TIMEOUT_S_MAX = 5.0
"""For a backend that hangs in ``close``; a busy disk needs a second or two to free its folder."""

CHECK_TIMEOUT_S_MAX = 60.0  # of one check; a module variable so that a slow store can raise it


class NotConforming(AssertionError):
    """Raised by a check when a backend or policy breaks its contract. The text names the part."""


class Bench(NamedTuple):
    """An open backend and the slots it works on."""

    backend: Backend
    slots: SlotMemory
    lost: set[bytes]  #: the keys that it has called ``on_lost`` for
    lost_elsewhere: set[int]  #: the threads that it did so on, except the event loop's
    states: list[Connection]  #: of its connection, as it has reported them

    async def store(self, blocks: Sequence[Block], *, slot: int = 0) -> list[Outcome]:
        """Store the blocks from the slots from ``slot`` on; refuses a wrong number of outcomes."""
        views = [self.slots.view(slot + index) for index in range(len(blocks))]
        for view, block in zip(views, blocks, strict=True):
            view[:] = block.data
        outcomes = await self.backend.store(
            [
                StoreBlock(block.key, view.toreadonly(), block.digest)
                for view, block in zip(views, blocks, strict=True)
            ]
        )
        expect(len(outcomes) == len(blocks), "store must give one outcome a block")
        for view, block in zip(views, blocks, strict=True):
            expect(view == block.data, "store must not change the block it is given")
            view[:] = bytes(len(view))  # The stored copy must not depend on the slot any more.
        return list(outcomes)

    async def keep(self, blocks: Sequence[Block]) -> None:
        """Store the blocks, all of which must be DONE."""
        outcomes = await self.store(blocks)
        done = all(outcome is Outcome.DONE for outcome in outcomes)
        expect(done, f"storing with room to spare must be DONE, got {outcomes}")

    async def load(self, blocks: Sequence[Block], *, slot: int = 0) -> list[Loaded]:
        """Load the blocks into the slots from ``slot`` on, prefilled so that no match is chance."""
        views = [self.slots.view(slot + index) for index in range(len(blocks))]
        for view, block in zip(views, blocks, strict=True):
            view[:] = bytes(byte ^ 0xFF for byte in block.data[:1]) * len(view)
        loaded = await self.backend.load(
            [LoadBlock(block.key, view) for view, block in zip(views, blocks, strict=True)]
        )
        expect(len(loaded) == len(blocks), "load must return one outcome per block")
        return list(loaded)

    async def expect_kept(self, blocks: Sequence[Block], *, slot: int = 0) -> None:
        """Load the blocks, each of which must come back whole and with its digest."""
        for index, answer in enumerate(await self.load(blocks, slot=slot)):
            self.expect_block(blocks[index], answer, slot + index)

    def expect_block(self, block: Block, answer: Loaded, slot: int) -> None:
        """Compare one result and its slot with the stored block."""
        name = block.key.hex()
        expect(answer.outcome is Outcome.DONE, f"load of {name} must be DONE, got {answer}")
        expect(self.slots.view(slot) == block.data, f"load of {name} brought other bytes")
        expect(answer.digest == block.digest, f"load of {name} brought another digest")

    async def expect_absent(self, blocks: Sequence[Block]) -> None:
        """Load the blocks, none of which may be there."""
        for block, answer in zip(blocks, await self.load(blocks), strict=True):
            absent = answer.outcome is Outcome.ABSENT
            expect(absent, f"load of {block.key.hex()} must be ABSENT, got {answer}")


class Block(NamedTuple):
    """A key, the bytes stored under it and the digest stored with them."""

    key: bytes
    data: bytes
    digest: bytes


def new_block(size: int = BLOCK_BYTES, *, key: bytes | None = None) -> Block:
    """Return random bytes under a new key, unless one is given."""
    key = os.urandom(32) + GROUP if key is None else key
    data = random_data(size)
    return Block(key, data, block_digest(key, memoryview(data)))


def new_blocks(count: int, size: int = BLOCK_BYTES) -> list[Block]:
    """Return ``count`` new blocks."""
    return [new_block(size) for _ in range(count)]


def expect(condition: bool, promise: str) -> None:  # noqa: FBT001 - reads as a sentence
    """Raise ``NotConforming`` with the broken promise, also under ``python -O``."""
    if not condition:
        raise NotConforming(promise)


def context(size: int = BLOCK_BYTES, model: str = "conformance/model") -> BackendContext:
    """Return a context such as an engine gives, vLLM's own folder fields included."""
    fields = {"model_name": model, "tokens_per_hash": 16, "blocks_per_file": size}
    namespace = Namespace({"model_name": model, "block_bytes": size}, fields, 0)
    return BackendContext(size, namespace, "1:conformance")


@asynccontextmanager
async def opened(
    make: MakeBackend, where: BackendContext | None = None, *, again: bool = False
) -> AsyncIterator[Bench]:
    """Open a backend on ``BLOCKS_MIN`` slots, bounded in time, and close it at the end.

    A backend that reports a connection is used once that is up.
    Unless it is opened ``again``, a bounded one is emptied of other checks' blocks.
    """
    where = context() if where is None else where
    try:
        with anyio.fail_after(CHECK_TIMEOUT_S_MAX):
            backend = make(where)
            lost: set[bytes] = set()
            lost_elsewhere: set[int] = set()
            here = threading.get_ident()

            def on_lost(keys: Sequence[bytes]) -> None:
                lost.update(keys)
                lost_elsewhere.update({threading.get_ident()} - {here})

            has_connection, is_up = anyio.Event(), anyio.Event()
            states: list[Connection] = []

            def on_connection(state: Connection) -> None:
                states.append(state)
                (is_up if state is Connection.UP else has_connection).set()

            backend.on_lost = on_lost
            backend.on_connection = on_connection
            await backend.open()
            slots = SlotMemory.anonymous(BLOCKS_MIN, where.block_bytes)
            await backend.register_memory(slots.buffer)
            try:
                if has_connection.is_set():
                    await is_up.wait()
                if backend.traits.capacity_blocks is not None and not again:
                    left = [key for keys in backend.contents() for key in keys]
                    if left:
                        await backend.remove(left)
                yield Bench(backend, slots, lost, lost_elsewhere, states)
            finally:
                with anyio.CancelScope(shield=True), anyio.move_on_after(CLOSE_TIMEOUT_S_MAX):
                    await backend.close()
    except TimeoutError as error:
        raise NotConforming(f"no answer within {CHECK_TIMEOUT_S_MAX} s") from error
