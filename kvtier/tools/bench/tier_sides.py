"""Defines the two kinds of sides of ``kvtier bench tier``: a tier's backend, and a plain client.

Both run on one event loop of this process, so that its processor time is a side's cost, and move
the blocks of one memory: stores read the first half, loads fill the second.
"""

from __future__ import annotations

import asyncio
import hashlib
from abc import ABC, abstractmethod
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from typing_extensions import override

from kvtier.errors import Misuse, StoreFault
from kvtier.plugin_api.backend import (
    Connection,
    LoadBlock,
    Loaded,
    Outcome,
    StoreBlock,
    block_digest,
)
from kvtier.plugin_api.threads import DaemonThreads
from kvtier.tier.backend_driver import DIGEST_INLINE_BYTES_MAX, DIGEST_THREADS
from kvtier.tools.bench.call_legs import STORE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from kvtier.plugin_api.backend import Backend
    from kvtier.plugin_api.slot_memory import SlotMemory
    from kvtier.tools.bench.plain_clients import PlainClient

T = TypeVar("T")

CONNECT_S_MAX: Final = 10.0
_GROUP: Final = bytes(4)  #: the end of vLLM's keys


class CallShape(NamedTuple):
    """The calls by which a side moves a leg."""

    blocks: int  #: in each call
    at_once: int  #: calls


class CallSide(ABC):
    """One way to move blocks to a server and back."""

    name: str

    @abstractmethod
    def shape(self, kind: str) -> CallShape:
        """Return the shape of its stores, or loads."""

    @abstractmethod
    async def call(self, kind: str, leg: int, numbers: Sequence[int]) -> None:
        """Store or load the blocks of these numbers. Raises ``StoreFault`` if one is missing."""

    @abstractmethod
    async def remove(self, leg: int, numbers: Sequence[int]) -> None:
        """Remove the blocks that a leg has stored."""

    def prepare_load(self) -> None:  # noqa: B027 - most need nothing
        """Get ready for a leg of loads. Not timed."""


class BackendSide(CallSide):
    """A backend, driven as by the layer above it: with a digest for each block.

    Digests are computed for stores, and compared after loads.
    """

    def __init__(self, name: str, backend: Backend, memory: SlotMemory, token: str) -> None:
        self.name = name
        self._backend = backend
        self._memory = memory
        self._count = memory.slot_count // 2
        self._token = token
        self._digests = DaemonThreads(DIGEST_THREADS, f"{name}-digest")

    async def open(self) -> None:
        """Open the backend and wait until it has reached its server. Raises ``Misuse``."""
        has_connection, is_up = asyncio.Event(), asyncio.Event()

        def on_connection(state: Connection) -> None:
            has_connection.set()
            if state is Connection.UP:
                is_up.set()

        self._backend.on_connection = on_connection
        await self._backend.open()
        await self._backend.register_memory(self._memory.buffer)
        if not has_connection.is_set():
            return
        try:
            async with asyncio.timeout(CONNECT_S_MAX):
                await is_up.wait()
        except TimeoutError:
            raise Misuse(
                f"--tier: {self._backend.place} is not reached within {CONNECT_S_MAX:g} s. Start "
                "the server, or name another. The log above has the reason."
            ) from None

    async def close(self) -> None:
        """Close the backend."""
        await self._backend.close()
        self._digests.stop()

    @override
    def shape(self, kind: str) -> CallShape:
        traits = self._backend.traits
        if kind == STORE:
            return CallShape(traits.store_batch_blocks_max, traits.store_batches_max)
        return CallShape(traits.load_batch_blocks_max, traits.load_batches_max)

    @override
    async def call(self, kind: str, leg: int, numbers: Sequence[int]) -> None:
        if kind == STORE:
            outcomes = await self._store(leg, numbers)
        else:
            outcomes = await self._load(leg, numbers)
        for outcome in outcomes:
            if outcome is not Outcome.DONE:
                raise StoreFault(
                    f"a {kind} of {self.name} ended as {outcome.name}. Give the server more room, "
                    "or give fewer --bytes; the log above says more"
                )

    @override
    async def remove(self, leg: int, numbers: Sequence[int]) -> None:
        await self._backend.remove([self._key(leg, number) for number in numbers])

    async def probe(self, leg: int, numbers: Sequence[int]) -> None:
        """Look these blocks up. Raises ``StoreFault``."""
        await self._backend.probe([self._key(leg, number) for number in numbers])

    def counters(self) -> Mapping[str, int]:
        """Return the backend's counters."""
        return self._backend.counters()

    @override
    def prepare_load(self) -> None:
        """Clear the loads' buffers, so that no earlier block is taken for a loaded one."""
        zeros = bytes(self._memory.block_bytes)
        for number in range(self._count):
            self._memory.view(self._count + number)[:] = zeros

    async def _store(self, leg: int, numbers: Sequence[int]) -> Sequence[Outcome]:
        def with_digests() -> list[StoreBlock]:
            keys = [self._key(leg, number) for number in numbers]
            views = [self._memory.view(number).toreadonly() for number in numbers]
            both = zip(keys, views, strict=True)
            return [StoreBlock(key, view, block_digest(key, view)) for key, view in both]

        return await self._backend.store(await self._digest(len(numbers), with_digests))

    async def _load(self, leg: int, numbers: Sequence[int]) -> Sequence[Outcome]:
        blocks = [
            LoadBlock(self._key(leg, number), self._memory.view(self._count + number))
            for number in numbers
        ]
        loaded = await self._backend.load(blocks)

        def checked() -> list[Outcome]:
            return [_checked(*both) for both in zip(blocks, loaded, strict=True)]

        return await self._digest(len(numbers), checked)

    async def _digest(self, blocks: int, work: Callable[[], T]) -> T:
        if blocks * self._memory.block_bytes <= DIGEST_INLINE_BYTES_MAX:
            return work()
        return await self._digests.run(work)

    def _key(self, leg: int, number: int) -> bytes:
        return _hash(self._token, leg, number) + _GROUP


class ClientSide(CallSide):
    """A plain client in one of its ways, with a number of calls at once."""

    def __init__(
        self, client: PlainClient, way: str, at_once: int, memory: SlotMemory, tier: BackendSide
    ) -> None:
        """``tier``: the side whose number of blocks in a call is used."""
        way_shown = f", {way}" if way else ""
        self.name = f"{client.library}{way_shown}, {at_once} at once"
        self._client = client
        self._way = way
        self._at_once = at_once
        self._memory = memory
        self._count = memory.slot_count // 2
        self._tier = tier

    @override
    def shape(self, kind: str) -> CallShape:
        return CallShape(self._tier.shape(kind).blocks, self._at_once)

    @override
    async def call(self, kind: str, leg: int, numbers: Sequence[int]) -> None:
        names = self._names(leg, numbers)
        with storage_faults(self.name):
            if kind == STORE:
                views = [self._memory.view(number) for number in numbers]
                await self._client.store(self._way, names, views)
            else:
                views = [self._memory.view(self._count + number) for number in numbers]
                await self._client.load(self._way, names, views)

    @override
    async def remove(self, leg: int, numbers: Sequence[int]) -> None:
        with storage_faults(self.name):
            await self._client.remove(self._names(leg, numbers))

    def _names(self, leg: int, numbers: Sequence[int]) -> list[str]:
        return [_hash("plain", leg, number).hex() for number in numbers]


@contextmanager
def storage_faults(name: str) -> Iterator[None]:
    """Raise ``StoreFault`` in place of a library's exceptions."""
    try:
        yield
    except StoreFault:
        raise
    except Exception as error:
        raise StoreFault(f"{name}: {type(error).__name__}: {error}") from error


def _hash(token: str, leg: int, number: int) -> bytes:
    """Return 32 bytes that are distributed like those of vLLM's keys."""
    return hashlib.blake2b(f"{token} {leg} {number}".encode(), digest_size=32).digest()


def _checked(block: LoadBlock, loaded: Loaded) -> Outcome:
    if loaded.outcome is Outcome.DONE and block_digest(block.key, block.buffer) != loaded.digest:
        return Outcome.DAMAGED
    return loaded.outcome
