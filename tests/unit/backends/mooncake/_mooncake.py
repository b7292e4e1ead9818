"""What the tests of the mooncake backend share: a context, and blocks in and out of it."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

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
from kvtier_backends.mooncake import MooncakeBackend
from tests.support.patience import until_true
from tests.unit.backends._media import key_of as key_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

BLOCK_BYTES = 256 << 10  # too large to be staged: the suite has small ones
SLOTS = 64
CONTEXT = BackendContext(BLOCK_BYTES, Namespace({"model_name": "org/m"}), "1:mooncake")


def data_of(number: int) -> bytes:
    return number.to_bytes(2, "big") * (BLOCK_BYTES // 2)


class Mooncake:
    """A backend that is open, its slots, and shorthand."""

    def __init__(self, backend: MooncakeBackend) -> None:
        self.backend = backend
        self.slots = SlotMemory.anonymous(SLOTS, BLOCK_BYTES)
        self.states: list[Connection] = []
        self._next_slot = 0

    @property
    def is_up(self) -> bool:
        return self.states[-1] is Connection.UP

    def view(self) -> memoryview:
        self._next_slot = (self._next_slot + 1) % SLOTS
        return self.slots.view(self._next_slot)

    async def until_up(self) -> None:
        await until_true(lambda: self.is_up, lambda: f"{self.states} {self.backend.counters()}")

    async def until_gone(self) -> None:
        await until_true(lambda: self.states[-1] is Connection.GONE, lambda: self.states)

    async def store(self, number: int, data: bytes | None = None) -> Outcome:
        view = self.view()
        view[:] = data_of(number) if data is None else data
        key = key_of(number)
        block = StoreBlock(key, view.toreadonly(), block_digest(key, view))
        (outcome,) = await self.backend.store([block])
        return outcome

    async def load(self, number: int) -> Outcome:
        """Load, and judge what is DONE by its digest, as the layer above does."""
        view = self.view()
        view[:] = bytes(BLOCK_BYTES)
        (loaded,) = await self.backend.load([LoadBlock(key_of(number), view)])
        if loaded.outcome is Outcome.DONE:
            if loaded != Loaded(Outcome.DONE, block_digest(key_of(number), view)):
                return Outcome.DAMAGED
            assert view == data_of(number)
        return loaded.outcome

    async def probe(self, number: int) -> bool:
        return (await self.backend.probe([key_of(number)]))[0]

    def name_of(self, number: int) -> str:
        return self.backend._transfers.name_of(key_of(number))

    def count(self, name: str) -> int:
        return self.backend.counters().get(name, 0)


def make_mooncake(
    address: str, context: BackendContext = CONTEXT, **options: Any
) -> MooncakeBackend:
    return MooncakeBackend.from_options({"master": address, **options}, context)


@asynccontextmanager
async def begin_mooncake(
    address: str, context: BackendContext = CONTEXT, **options: Any
) -> AsyncIterator[Mooncake]:
    """Open a backend, whether or not there is a master."""
    mooncake = Mooncake(make_mooncake(address, context, **options))
    mooncake.backend.on_connection = mooncake.states.append
    await mooncake.backend.open()
    await mooncake.backend.register_memory(mooncake.slots.buffer)
    try:
        yield mooncake
    finally:
        await mooncake.backend.close()


@asynccontextmanager
async def open_mooncake(
    address: str, context: BackendContext = CONTEXT, **options: Any
) -> AsyncIterator[Mooncake]:
    """Open a backend, and wait until it is up."""
    async with begin_mooncake(address, context, **options) as mooncake:
        await mooncake.until_up()
        yield mooncake
