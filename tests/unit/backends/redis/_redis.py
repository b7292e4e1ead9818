"""What the tests of the redis backend share: a context, and blocks in and out of it."""

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
from kvtier.plugin_api.deadlines import time_limit
from kvtier.plugin_api.slot_memory import SlotMemory
from kvtier_backends.redis import RedisBackend
from tests.support.patience import PATIENCE_S, until_true
from tests.unit.backends._media import key_of as key_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

BLOCK_BYTES = 200_000
"""More than a socket takes or gives at once, so that a block comes in parts."""

CONTEXT = BackendContext(
    BLOCK_BYTES, Namespace({"model_name": "org/m", "dtype": "bf16"}), "1:redis"
)
GUARD = b"\xa5" * BLOCK_BYTES
PATIENT = {"connect_timeout_s": PATIENCE_S, "call_timeout_s": PATIENCE_S}
"""For what must come. Where a time must run out, the test gives a short one."""


def data_of(number: int) -> bytes:
    return (number % 251).to_bytes(1, "big") * (BLOCK_BYTES - 1) + b"\n"


class Tier:
    """An open backend, slots, and shorthand."""

    def __init__(self, backend: RedisBackend) -> None:
        self.backend = backend
        self.slots = SlotMemory.anonymous(64, BLOCK_BYTES)
        self.states: list[Connection] = []
        backend.on_connection = self.states.append

    def is_in(self, state: Connection) -> bool:
        return bool(self.states) and self.states[-1] is state

    async def until(self, state: Connection) -> None:
        await until_true(lambda: self.is_in(state), lambda: self.states)

    async def store(self, *numbers: int, within_s: float = PATIENCE_S) -> list[Outcome]:
        blocks = []
        for slot, number in enumerate(numbers):
            view = self.slots.view(slot)
            view[:] = data_of(number)
            key = key_of(number)
            blocks.append(StoreBlock(key, view.toreadonly(), block_digest(key, view)))
        with time_limit(within_s):
            return list(await self.backend.store(blocks))

    async def load(self, *numbers: int, within_s: float = PATIENCE_S) -> list[Outcome]:
        """Load, and insist that what is DONE is right, as the layer above would."""
        blocks = [LoadBlock(key_of(n), self.slots.view(32 + at)) for at, n in enumerate(numbers)]
        for block in blocks:
            block.buffer[:] = GUARD
        with time_limit(within_s):
            loaded = await self.backend.load(blocks)
        return [
            _checked(number, block, answer)
            for number, block, answer in zip(numbers, blocks, loaded, strict=True)
        ]

    async def probe(self, *numbers: int) -> Sequence[bool]:
        return await self.backend.probe([key_of(number) for number in numbers])

    def name(self, number: int) -> bytes:
        return self.backend._description.name_of(key_of(number))

    def count(self, name: str) -> int:
        return self.backend.counters().get(name, 0)


def _checked(number: int, block: LoadBlock, answer: Loaded) -> Outcome:
    if answer.outcome is Outcome.DONE:
        assert block.buffer == data_of(number)
        assert answer.digest == block_digest(block.key, block.buffer)
    return answer.outcome


def make_redis(url: str, context: BackendContext = CONTEXT, **options: Any) -> RedisBackend:
    return RedisBackend.from_options({**PATIENT, "url": url, **options}, context)


@asynccontextmanager
async def open_redis(
    url: str, context: BackendContext = CONTEXT, **options: Any
) -> AsyncIterator[Tier]:
    tier = Tier(make_redis(url, context, **options))
    await tier.backend.open()
    try:
        yield tier
    finally:
        await tier.backend.close()
