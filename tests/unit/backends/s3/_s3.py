"""What the tests of the s3 backend share: an open backend, and blocks in and out of it."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio

from kvtier.plugin_api.backend import (
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
from kvtier_backends.s3 import S3Backend
from tests.support.patience import PATIENCE_S, POLL_S
from tests.support.s3_server import options_for
from tests.unit.backends._media import key_of as key_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

BLOCK_BYTES = 65536
CONTEXT = BackendContext(
    BLOCK_BYTES, Namespace({"model_name": "org/m", "dtype": "bf16", "block_bytes": 65536}), "1:s3"
)


def data_of(number: int) -> bytes:
    return (number % 251).to_bytes(1, "big") * (BLOCK_BYTES - 1) + b"\n"


class S3:
    """An open backend, its slots, and shorthand."""

    def __init__(self, backend: S3Backend) -> None:
        self.backend = backend
        self.slots = SlotMemory.anonymous(64, BLOCK_BYTES)
        self.states: list[Connection] = []
        self.next_slot = 0

    def view(self) -> memoryview:
        self.next_slot = (self.next_slot + 1) % 64
        return self.slots.view(self.next_slot)

    def block(self, number: int) -> StoreBlock:
        view = self.view()
        view[:] = data_of(number)
        return StoreBlock(key_of(number), view, block_digest(key_of(number), view))

    async def store(self, *numbers: int) -> list[Outcome]:
        return list(await self.backend.store([self.block(number) for number in numbers]))

    async def load(self, *numbers: int) -> list[Outcome]:
        """Load, and insist that what is DONE is right, as the layer above would."""
        blocks = [LoadBlock(key_of(number), self.view()) for number in numbers]
        for block in blocks:
            block.buffer[:] = bytes(BLOCK_BYTES)
        answers = await self.backend.load(blocks)
        for number, block, loaded in zip(numbers, blocks, answers, strict=True):
            if loaded.outcome is Outcome.DONE:
                assert block.buffer == data_of(number)
                assert loaded == Loaded(Outcome.DONE, block_digest(block.key, block.buffer))
        return [loaded.outcome for loaded in answers]

    async def probe(self, *numbers: int) -> list[bool]:
        return list(await self.backend.probe([key_of(number) for number in numbers]))

    def count(self, name: str) -> int:
        return self.backend.counters().get(name, 0)

    def set_timeout(self, seconds: float) -> None:
        """Set how long a request may take from now on: a time that is to run out, or patience."""
        self.backend._attempts._timeout_s = seconds
        self.backend._connection._timeout_s = seconds

    async def until(self, done: Callable[[], object]) -> None:
        """Wait for what the backend, or its server, does by itself."""
        with anyio.fail_after(PATIENCE_S):
            while not done():
                await anyio.lowlevel.checkpoint()
                await _pause()

    async def until_state(self, state: Connection) -> None:
        await self.until(lambda: self.states[-1:] == [state])


async def _pause() -> None:
    with anyio.move_on_after(POLL_S):
        await anyio.Event().wait()


def make_s3(
    endpoint: str, prefix: str, context: BackendContext = CONTEXT, **options: Any
) -> S3Backend:
    return S3Backend.from_options(options_for(endpoint, prefix, **options), context)


@asynccontextmanager
async def open_s3(
    endpoint: str,
    prefix: str = "p",
    context: BackendContext = CONTEXT,
    *,
    wait: bool = True,
    **options: Any,
) -> AsyncIterator[S3]:
    """Open a backend, and by default wait until it is connected."""
    s3 = S3(make_s3(endpoint, prefix, context, **options))
    s3.backend.on_connection = s3.states.append
    await s3.backend.open()
    try:
        if wait:
            await s3.until_state(Connection.UP)
        yield s3
    finally:
        await s3.backend.close()
