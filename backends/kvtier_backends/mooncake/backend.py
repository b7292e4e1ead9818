"""The ``mooncake`` tier's driver: options in, objects of a Mooncake store out.

Each call of the library runs in a thread, and can't be cancelled. An abandoned call keeps its
thread, which ``busy_threads`` counts until it is done with the buffers.
"""

from __future__ import annotations

import math
import time
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeVar

from anyio import move_on_after

from kvtier.errors import StoreFault
from kvtier.plugin_api.backend import (
    Backend,
    BackendContext,
    BackendTraits,
    Isolation,
    LoadBlock,
    Loaded,
    Outcome,
    StoreBlock,
)
from kvtier.plugin_api.deadlines import time_left_s
from kvtier.plugin_api.metrics import Counter
from kvtier.plugin_api.threads import DaemonThreads
from kvtier_backends.incidents import IncidentLog, TierCounters
from kvtier_backends.mooncake.connection import MasterConnection
from kvtier_backends.mooncake.library import load_library
from kvtier_backends.mooncake.mooncake_options import read_options
from kvtier_backends.mooncake.namespace_object import NamespaceObject
from kvtier_backends.mooncake.registered import RegisteredMemory, blocks_of_a_call
from kvtier_backends.mooncake.transfers import BlockTransfers
from kvtier_backends.mooncake.trial import try_store
from kvtier_backends.shared.metrics import SERVERS
from kvtier_backends.shared.namespaces import namespace_name

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvtier.plugin_api.metrics import BackendMetric
    from kvtier_backends.mooncake.client import StoreClient
    from kvtier_backends.mooncake.mooncake_options import MooncakeOptions
    from kvtier_backends.shared.records import Records

PROBE_THREADS: Final = 2

PROBE_BATCH_BLOCKS: Final = 512
"""The master answers all keys of a call in one message."""

_CLOSE_TIMEOUT_S_MAX = 1.0

Answer = TypeVar("Answer")


class MooncakeBackend(Backend):
    """Keeps each block, with its trailer, as one object of a Mooncake store.

    The slots are registered with the store's client, which moves blocks from and to them;
    small blocks go through the tier's own memory.
    While the master is away, calls fail at once, and the connection reports ``GONE``.
    """

    type_name: ClassVar[str] = "mooncake"
    metrics: ClassVar[Mapping[str, BackendMetric]] = {
        **SERVERS,
        "leases_expired": Counter("Blocks missed because their lease ended within the load."),
        "owners_gone": Counter("Blocks missed because the process that held them is gone."),
        "removes_failed": Counter("Blocks that could not be removed."),
    }
    isolation: ClassVar[Isolation] = "process"
    """The library is native code that may end its process, and its setup holds the GIL."""

    def __init__(
        self,
        library: Any,  # noqa: ANN401 - a module without types
        options: MooncakeOptions,
        records: Records,
        context: BackendContext,
    ) -> None:
        self.traits = BackendTraits(
            load_batches_max=options.n_read_threads,
            store_batches_max=options.n_write_threads,
            load_batch_blocks_max=blocks_of_a_call(context.block_bytes),
            store_batch_blocks_max=blocks_of_a_call(context.block_bytes),
            presence_ttl_s=options.presence_ttl_s,
            connects=True,
            probe_batches_max=PROBE_THREADS,
            probe_batch_blocks_min=PROBE_BATCH_BLOCKS,
            probe_batch_blocks_max=PROBE_BATCH_BLOCKS,
        )
        name = context.tier_name
        self._place = options.place
        self._records = records
        self._counters = TierCounters()
        incidents = IncidentLog("mooncake", name, options.place, self._counters)
        self._memory = RegisteredMemory(
            options.n_read_threads + options.n_write_threads,
            context.block_bytes,
            are_plain=records.are_plain,
        )
        prefix = f"{options.key_prefix}/{namespace_name(records.context)}/"
        self._connection = MasterConnection(
            library,
            options,
            self._memory,
            NamespaceObject(prefix, records.context, self._memory),
            self._counters,
            tier_name=name,
        )
        self._transfers = BlockTransfers(
            prefix, records, self._memory, incidents, on_no_master=self._connection.note_unanswered
        )
        self._readers = DaemonThreads(options.n_read_threads, f"{name}-read")
        self._writers = DaemonThreads(options.n_write_threads, f"{name}-write")
        self._askers = DaemonThreads(PROBE_THREADS, f"{name}-probe")
        self._is_closed = False

    @classmethod
    def from_options(cls, options: Mapping[str, Any], context: BackendContext) -> MooncakeBackend:
        """Check the options, or refuse them with a ``ConfigError``. Does not connect."""
        reader, given, records = read_options(options, context)
        return cls(load_library(reader), given, records, context)

    @classmethod
    def check_keys(cls, options: Mapping[str, Any], context: BackendContext) -> None:
        """Check all that is checked before the tier connects."""
        cls.check_options(options, context)

    @classmethod
    def check_options(cls, options: Mapping[str, Any], context: BackendContext) -> str:
        """Check the options, and that the library can be loaded. Does not connect."""
        reader, given, _ = read_options(options, context)
        load_library(reader)
        return given.place

    @classmethod
    def check_connection(cls, options: Mapping[str, Any], context: BackendContext) -> str:
        """Set up a client; store, load and remove an object if that is allowed."""
        reader, given, _ = read_options(options, context)
        return try_store(load_library(reader), given, reader, read_only=context.read_only)

    @property
    def place(self) -> str:
        """The master's address, and the prefix of all names."""
        return self._place

    async def open(self) -> None:
        """Begin to connect. Does not wait for the master."""
        self._connection.start(self.on_connection)

    async def register_memory(self, slots: memoryview) -> None:
        """Register the slots with the client, now or as soon as there is one."""
        self._memory.add_slots(slots)
        await self._connection.register()

    async def probe(self, keys: Sequence[bytes]) -> Sequence[bool]:
        """Query the master, which may not have noticed yet that a block's owner has died."""
        return await self._asked(partial(self._transfers.probe, keys=keys))

    async def load(self, blocks: Sequence[LoadBlock]) -> Sequence[Loaded]:
        """Load the blocks into their slots. FAILED without a master."""
        client = self._connection.client
        if client is None:
            return [Loaded(Outcome.FAILED)] * len(blocks)
        load = partial(self._transfers.load, client, blocks, _until_s())
        return await self._readers.run(load)

    async def store(self, blocks: Sequence[StoreBlock]) -> Sequence[Outcome]:
        """Store the blocks from their slots. FAILED without a master."""
        client = self._connection.client
        if client is None:
            return [Outcome.FAILED] * len(blocks)
        store = partial(self._transfers.store, client, blocks, _until_s())
        return await self._writers.run(store)

    async def remove(self, keys: Sequence[bytes]) -> None:
        """Remove the blocks, even while a lease on them lasts. Raises if one may be left."""
        await self._asked(partial(self._transfers.remove, keys=keys))

    async def close(self) -> None:
        """Release the client. Waits a second for it at most."""
        if self._is_closed:
            return
        self._is_closed = True
        with move_on_after(_CLOSE_TIMEOUT_S_MAX):
            await self._connection.stop()
        for threads in (self._readers, self._writers, self._askers):
            threads.stop()

    def busy_threads(self) -> int:
        """Count the calls that may still touch a block's buffer, including cancelled ones."""
        return self._readers.busy() + self._writers.busy()

    def counters(self) -> Mapping[str, int]:
        """Return error counts by kind, without those that are zero."""
        return {**self._counters.counts(), **self._records.counts()}

    async def _asked(self, ask: Callable[[StoreClient], Answer]) -> Answer:
        client = self._connection.client
        if client is None:
            raise StoreFault("the master of the store is not reached")
        return await self._askers.run(partial(ask, client))


def _until_s() -> float:
    """Return this call's deadline, by ``time.monotonic``."""
    left_s = time_left_s()
    return math.inf if left_s == math.inf else time.monotonic() + left_s
