"""The ``s3`` tier's driver: one object for each block, one request for each object.

Bytes go from the slot to the socket without a copy, and from the library's buffer into the
slot by one copy, made on the loop's thread: a cancelled call writes nothing later.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeVar

from kvtier.errors import StoreFault
from kvtier.plugin_api.backend import (
    Backend,
    BackendContext,
    BackendTraits,
    Connection,
    Isolation,
    LoadBlock,
    Loaded,
    Outcome,
    StoreBlock,
)
from kvtier.plugin_api.metrics import Counter, Gauge
from kvtier_backends.incidents import IncidentLog, TierCounters
from kvtier_backends.s3.attempts import Attempts
from kvtier_backends.s3.client import S3Client, make_store
from kvtier_backends.s3.connection import BucketConnection
from kvtier_backends.s3.failures import Failure, RequestFailed, WrongLength
from kvtier_backends.s3.library_threads import LentBuffers
from kvtier_backends.s3.request_limiter import RequestLimiter, Urgency
from kvtier_backends.s3.s3_options import (
    Address,
    S3Options,
    address_of,
    credentials_of,
    read_options,
)
from kvtier_backends.s3.trial import try_bucket
from kvtier_backends.shared.metrics import SERVERS
from kvtier_backends.shared.namespaces import OwnDescription, namespace_name
from kvtier_backends.shared.record_threads import RecordThreads, StoredRecord
from kvtier_backends.shared.records import make_records

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from kvtier.plugin_api.metrics import BackendMetric
    from kvtier_backends.shared.records import Records

FORMAT_NAME: Final = "kvtier s3"
FORMAT_VERSION: Final = 1
PROBE_BATCH_BLOCKS_MAX: Final = 4
"""Each key is a request, and all calls together run as many at once as allowed: requests that
wait for their turn here delay a short probe."""

_SHARD_DIGITS: Final = 3
"""S3 spreads load by name prefixes: 4,096 of them, below each namespace."""

_REMOVED_AT_ONCE_MAX: Final = 256

Item = TypeVar("Item")
Answer = TypeVar("Answer")


class S3Backend(Backend):
    """Keeps each block in an object ``<prefix>/<namespace>/<hhh>/<key in hex>``.

    The object is the block alone, of a round length; the trailer is in its metadata. Some 90 bytes
    behind the block halved the throughput of loads from Ceph: they were a packet of their own,
    which was not sent before the previous one had been acknowledged.

    Options: see ``S3Options``. ``open`` does not wait for the server. A cancelled store may
    have succeeded, and the library may read its buffer for a moment longer, which
    ``busy_threads`` counts; a cancelled load writes to no buffer.
    """

    type_name: ClassVar[str] = "s3"
    metrics: ClassVar[Mapping[str, BackendMetric]] = {
        **SERVERS,
        "connected": Gauge("Whether the server can be used (1) or not (0)."),
        "requests_limit": Gauge("How many requests may run at once."),
        **{
            f"requests_{verb}": Counter(
                "Requests sent, including those that failed; a removal has up to 256 blocks.",
                name="s3_requests",
                labels=(("request", verb),),
            )
            for verb in ("put", "get", "head", "delete")
        },
        "bytes_put": Counter("Bytes of bodies sent by requests that succeeded."),
        "bytes_got": Counter("Bytes of bodies received."),
        "stores_known": Counter("Blocks not sent because the bucket had them."),
        "probes_failed": Counter("Lookups that failed."),
        "removals_failed": Counter("Removals that failed."),
        "slow_downs": Counter("Responses in which the server requested a lower rate."),
    }
    medium: ClassVar[str] = "STORAGE"
    isolation: ClassVar[Isolation] = "process"
    """A request costs tenths of a millisecond of Python, for which no scheduler should wait;
    and the library is native code with threads of its own."""

    def __init__(
        self,
        client: S3Client,
        address: Address,
        records: Records,
        given: S3Options,
    ) -> None:
        context = records.context
        name = context.tier_name
        batches_max = min(given.requests_max, 64)
        self.traits = BackendTraits(
            load_batches_max=batches_max,
            store_batches_max=batches_max,
            presence_ttl_s=given.presence_ttl_s,
            connects=True,
            probe_batch_blocks_min=1,
            probe_batch_blocks_max=PROBE_BATCH_BLOCKS_MAX,
        )
        self._address = address
        self._namespace = namespace_name(context)
        self._records = records
        self._client = client
        self._counters = TierCounters()
        self._incidents = IncidentLog("s3", name, str(address), self._counters)
        self._limiter = RequestLimiter(given.requests_max)
        self._attempts = Attempts(
            self._limiter, given.request_timeout_s, self._note, self._is_connected
        )
        self._coding = RecordThreads(records, name)
        self._lent = LentBuffers()
        self._connection = BucketConnection(
            client,
            description=OwnDescription(
                address.below(self._namespace, "description.json"),
                FORMAT_NAME,
                FORMAT_VERSION,
                context,
                option="prefix in its url",
            ),
            timeout_s=given.request_timeout_s,
            place=str(address),
            tier_name=name,
            counters=self._counters,
        )

    @classmethod
    def from_options(cls, options: Mapping[str, Any], context: BackendContext) -> S3Backend:
        """Check the options; raises ``ConfigError``. Sends nothing."""
        return cls(*_read(options, context))

    @classmethod
    def check_keys(cls, options: Mapping[str, Any], context: BackendContext) -> None:
        """Check all that is checked before the tier connects."""
        cls.check_options(options, context)

    @classmethod
    def check_options(cls, options: Mapping[str, Any], context: BackendContext) -> str:
        """Check the options, and that the library and the credentials are available."""
        _, address, _, _ = _read(options, context)
        return str(address)

    @classmethod
    def check_connection(cls, options: Mapping[str, Any], context: BackendContext) -> str:
        """Store, load and remove an object, or look one up."""
        client, address, _, given = _read(options, context)
        reader = read_options(options, context)[1]
        trial = try_bucket(client, address, given, reader, read_only=context.read_only)
        return asyncio.run(trial)

    @property
    def place(self) -> str:
        """The normalized URL, and the server if it is not the provider's own."""
        return str(self._address)

    async def open(self) -> None:
        """Begin to connect. Does not wait."""
        self._connection.start(self.on_connection)

    async def probe(self, keys: Sequence[bytes]) -> Sequence[bool]:
        """Query the length of each object. One of another length counts as missing.

        Raises ``StoreFault`` if no request is answered.
        """
        found = await _each(self._probe_one, keys)
        if found and all(isinstance(each, RequestFailed) for each in found):
            raise StoreFault(f"no probe was answered: {found[0]}")
        return [each is True for each in found]

    async def load(self, blocks: Sequence[LoadBlock]) -> Sequence[Loaded]:
        """Get each object whole, and decode its block into the buffer."""
        return await _each(self._load_one, blocks)

    async def store(self, blocks: Sequence[StoreBlock]) -> Sequence[Outcome]:
        """Put an object for each block, unless it exists."""
        return await _each(self._store_one, blocks)

    async def remove(self, keys: Sequence[bytes]) -> None:
        """Remove the objects of these keys, many at once. Raises ``StoreFault`` if that fails."""
        names = [self._name(key) for key in keys]
        for start in range(0, len(names), _REMOVED_AT_ONCE_MAX):
            batch = names[start : start + _REMOVED_AT_ONCE_MAX]
            try:
                await self._attempts.run(Urgency.STORE, partial(self._client.remove, batch))
            except RequestFailed as failed:
                self._incidents.report("store", "removals_failed", failed, count=len(batch))
                raise

    async def close(self) -> None:
        """Stop watching the connection. Waits only for that task to end."""
        await self._connection.stop()
        self._client.close()
        self._coding.stop()

    def busy_threads(self) -> int:
        """Count the threads that encrypt or decrypt, and the buffers that the library may read."""
        return self._coding.busy() + self._lent.count()

    def counters(self) -> Mapping[str, int]:
        """Return counts of requests, bytes and faults, the request limit, and ``connected``."""
        levels = {
            "requests_limit": self._limiter.limit,
            "connected": int(self._is_connected()),
        }
        sent = self._client.counts()
        return {**self._counters.counts(), **self._records.counts(), **sent, **levels}

    async def _probe_one(self, key: bytes) -> bool | RequestFailed:
        try:
            length = await self._attempts.run(
                Urgency.PROBE, partial(self._client.length, self._name(key))
            )
        except RequestFailed as failed:
            self._incidents.report("load", "probes_failed", failed)
            return failed
        return length is not None and self._records.is_payload_length(length)

    async def _load_one(self, block: LoadBlock) -> Loaded:
        is_length = self._records.is_payload_length
        try:
            body, trailer = await self._attempts.run(
                Urgency.LOAD, partial(self._client.get, self._name(block.key), is_length)
            )
        except WrongLength as wrong:
            self._incidents.report("load", "blocks_damaged", wrong)
            return Loaded(Outcome.DAMAGED)
        except RequestFailed as failed:
            if failed.failure is Failure.ABSENT:
                return Loaded(Outcome.ABSENT)
            self._incidents.report("load", "loads_failed", _in_words(failed))
            return Loaded(Outcome.FAILED)
        stored = StoredRecord(block.key, body, trailer, block.buffer)
        (loaded,) = await self._coding.decode_all([stored])
        if loaded.outcome is Outcome.DAMAGED:
            self._counters.add("blocks_damaged")
        self._incidents.success("load")
        return loaded

    async def _store_one(self, block: StoreBlock) -> Outcome:
        (record,) = await self._coding.encode_all([block])
        view = self._lent.lend(record.payload)
        try:
            is_new = await self._attempts.run(
                Urgency.STORE,
                partial(self._client.put, self._name(block.key), view, record.trailer),
            )
        except RequestFailed as failed:
            if failed.failure is Failure.FULL:
                self._incidents.report("store", "stores_full", _in_words(failed))
                return Outcome.FULL
            self._incidents.report("store", "stores_failed", _in_words(failed))
            return Outcome.FAILED
        finally:
            self._lent.give_back(view)
        self._records.give_back(record.payload)
        if not is_new:
            self._counters.add("stores_known")
        self._incidents.success("store")
        return Outcome.DONE

    def _name(self, key: bytes) -> str:
        digits = key.hex()
        return self._address.below(self._namespace, digits[:_SHARD_DIGITS], digits)

    def _is_connected(self) -> bool:
        return self._connection.state is Connection.UP

    def _note(self, failed: RequestFailed, urgency: Urgency) -> None:
        if failed.failure is Failure.BUSY:
            self._counters.add("slow_downs")
        self._connection.suspect(failed, of_store=urgency is Urgency.STORE)


def _in_words(failed: RequestFailed) -> StoreFault:
    """Return a request's failure, with the remedy, for the log."""
    remedy = failed.remedy
    if not remedy and failed.failure is Failure.DENIED:
        remedy = "the key may lack the right s3:PutObject, s3:GetObject or s3:DeleteObject"
    return StoreFault(f"{failed} ({remedy})") if remedy else failed


def _read(
    options: Mapping[str, Any], context: BackendContext
) -> tuple[S3Client, Address, Records, S3Options]:
    """Parse the options of the tier and of its records. Raises ``ConfigError``."""
    given, reader = read_options(options, context)
    address = address_of(given, reader)
    credentials = credentials_of(given, reader)
    records = make_records(reader, context)
    reader.finish()
    client = S3Client(partial(make_store, given, address, where=reader.where), credentials)
    return client, address, records, given


async def _each(call: Callable[[Item], Awaitable[Answer]], items: Sequence[Item]) -> list[Answer]:
    """Call for all items at once, and return the results in order."""
    if len(items) == 1:
        return [await call(items[0])]
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_as_coroutine(call, item)) for item in items]
    return [task.result() for task in tasks]


async def _as_coroutine(call: Callable[[Item], Awaitable[Answer]], item: Item) -> Answer:
    return await call(item)
