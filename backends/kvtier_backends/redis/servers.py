"""Tracks which servers have which blocks, and checks again when that may have changed.

Each check queries the topology (one server, the master that sentinels name, or a cluster's nodes),
logs in, and compares the description of the namespace with the engine's own. One connection is kept
only to notice at once when its server ends it.

A cluster divides its 16384 hash slots among its masters; a block's name has one slot. The map is
queried when the tier connects, at each check, and after a MOVED reply.

A readable description of the namespace is stored beside its blocks. Block names hold a digest of
the whole description. So a different description means that two namespaces share a digest, or that
another program wrote there: nothing is served then.
"""

from __future__ import annotations

import asyncio
import math
import re
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from kvtier.errors import StoreFault
from kvtier.plugin_api.backend import Connection
from kvtier_backends.redis.client import ServerRefused
from kvtier_backends.redis.redis_options import Address
from kvtier_backends.redis.server_errors import MAXCLIENTS, error_named
from kvtier_backends.shared import kept_connection
from kvtier_backends.shared.kept_connection import KeptConnection
from kvtier_backends.shared.namespaces import OwnDescription, namespace_name

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from kvtier.plugin_api.backend import BackendContext
    from kvtier_backends.incidents import TierCounters
    from kvtier_backends.redis import resp
    from kvtier_backends.redis.client import RedisClient
    from kvtier_backends.redis.redis_options import RedisOptions

CHECK_S: Final = 10.0
FORMAT_VERSION: Final = 1
UNSETTLED: Final = frozenset(["MOVED", "ASK", "TRYAGAIN"])
"""Errors of a cluster while hash slots move."""


class ConnectionWatch(KeptConnection):
    """Tracks the state of the tier's servers. Loop thread only."""

    def __init__(
        self,
        client: RedisClient,
        given: RedisOptions,
        description: Description,
        tier_name: str,
        counters: TierCounters,
        on_servers: Callable[[Collection[Address]], None],
    ) -> None:
        """``on_servers``: called with the servers in use; with none if the connection is gone."""
        super().__init__("redis", tier_name, given.place, counters)
        self._check_every_s = CHECK_S
        self._client = client
        self._given = given
        self._description = description
        self._on_servers = on_servers
        self._has_tried = asyncio.Event()
        self._topology: Topology | None = None
        self._kept: resp.RespConnection | None = None
        self._kept_at: Address | None = None
        self._measure_from = 0.0  # not before
        self.gauges: Mapping[str, int] = {}  #: of the servers' memory; replaced, never changed

    async def topology(self) -> Topology:
        """Return the topology, after the first check. Raises ``StoreFault`` if not connected."""
        await self._has_tried.wait()
        if self.state is not Connection.UP or self._topology is None:
            raise StoreFault(f"not connected: {self._problem}")
        return self._topology

    def leave(self) -> None:
        """Check the servers again: one has reported that it is the wrong one."""
        self._drop_kept()
        self.doubt()

    async def _connect(self) -> None:
        try:
            await self._check()
        finally:
            self._has_tried.set()

    async def _check(self) -> None:
        try:
            await self._ask_servers()
        except ServerRefused as refused:
            # It has no room for a check's connection. Those that the tier has work as before.
            if refused.kind != MAXCLIENTS or self._kept is None:
                raise
            self.gauges = {}

    async def _ask_servers(self) -> None:
        topology = await discover(self._client, self._given)
        address = await self._description.compare(self._client, topology)
        if self._kept is None or self._kept_at != address:
            self._drop_kept()
            self._kept = await self._client.connect(address, self._kept_ended)
            self._kept_at = address
        self._topology = topology
        self._on_servers(topology.addresses)
        if kept_connection.clock() >= self._measure_from:
            await self._measure(topology.addresses)

    async def _measure(self, addresses: Collection[Address]) -> None:
        """Query the memory of all servers. Unless each of them reports it, it is not known."""
        self._measure_from = kept_connection.clock() + self._check_every_s / 2
        try:
            found = await asyncio.gather(*(self._memory_of(each) for each in addresses))
        except StoreFault as problem:
            self.gauges = {}
            if isinstance(problem, ServerRefused):  # each refusal is a line of the server's log
                self._measure_from = math.inf
            return
        used, limits = [used for used, _ in found], [limit for _, limit in found]
        capacity = {"capacity_bytes": sum(limits)} if all(limits) else {}  # else it is unbounded
        self.gauges = {"used_bytes": sum(used), **capacity}

    async def _memory_of(self, address: Address) -> tuple[int, int]:
        async with self._client.asking(address) as ask:
            return _memory_untrusted(await ask("INFO", "memory"), address)

    def _remedy(self, problem: StoreFault) -> str:
        kind = problem.kind if isinstance(problem, ServerRefused) else ""
        return error_named(kind).remedy or super()._remedy(problem)

    def _release(self) -> None:
        self.gauges, self._measure_from = {}, 0.0
        self._on_servers(())
        self._drop_kept()

    def _kept_ended(self, _connection: resp.RespConnection) -> None:
        self._kept = None
        self.doubt()

    def _drop_kept(self) -> None:
        if self._kept is not None:
            self._kept.abort()
            self._kept = None


class Description:
    """The description of the engine's own namespace, and the names of everything it stores."""

    def __init__(self, key_prefix: str, context: BackendContext) -> None:
        self._stem = f"{key_prefix}:{namespace_name(context)}:".encode()
        self.name = self._stem + b"description"
        self._own = OwnDescription(
            self.name.decode(), "kvtier-redis", FORMAT_VERSION, context, "key_prefix"
        )

    def name_of(self, key: bytes) -> bytes:
        """Return a block's name."""
        return self._stem + key.hex().encode()

    async def compare(self, client: RedisClient, topology: Topology) -> Address:
        """Write the description if there is none, and compare it. Returns its server's address.

        Raises ``OtherNamespace``, and ``StoreFault`` if the server can't be used.
        """
        address = topology.server_of(self.name)
        if address is None:
            raise StoreFault("no node of the cluster is in charge of the description")
        try:
            await self._compare_at(client, address)
        except ServerRefused as refused:
            # Its hash slot is moving. The next check will find it: block names distinguish
            # namespaces, too.
            if not topology.is_cluster or refused.kind not in UNSETTLED:
                raise
        return address

    async def _compare_at(self, client: RedisClient, address: Address) -> None:
        async with client.asking(address) as ask:
            if not self._own.is_read_only:
                try:
                    await ask("SET", self.name, self._own.text, "NX")
                except ServerRefused as refused:
                    if not error_named(refused.kind).refuses_writes:  # and serves its data
                        raise
            found = await ask("GET", self.name)
        if found is not None:
            self._own.refuse_other_untrusted(found)


class Topology:
    """Maps each block's name to its server. Does not change."""

    def __init__(
        self,
        ranges: Sequence[tuple[int, int, Address]],
        key_slot: Callable[[bytes], int],
        *,
        is_cluster: bool = False,
    ) -> None:
        """``ranges``: first and last hash slot, and their server."""
        self._ranges = sorted(ranges)
        self._key_slot = key_slot
        self.is_cluster = is_cluster
        self.addresses = frozenset(address for _, _, address in ranges)
        #: the server of all blocks, whatever their names; None if there are several
        self.only = None if is_cluster else ranges[0][2]

    def server_of(self, name: bytes) -> Address | None:
        """Return the server in charge of this name; None if there is none."""
        slot = self._key_slot(name)
        for first, last, address in self._ranges:
            if first <= slot <= last:
                return address
        return None


async def discover(client: RedisClient, given: RedisOptions) -> Topology:
    """Query which server has which blocks. Raises ``StoreFault``."""
    addresses = given.servers.addresses
    if given.mode == "cluster":
        ranges = await _first_answer(addresses, partial(_ask_node, client))
        return Topology(ranges, client.key_slot, is_cluster=True)
    if given.mode == "sentinel":
        ask = partial(_ask_sentinel, client, given.sentinel_master or "")
        addresses = (await _first_answer(addresses, ask),)
    return Topology([(0, 16383, addresses[0])], client.key_slot)


async def _ask_node(client: RedisClient, address: Address) -> list[tuple[int, int, Address]]:
    async with client.asking(address) as ask:
        found = await ask("CLUSTER", "SLOTS")
    try:
        ranges = [_range_untrusted(each, address) for each in found]
    except (TypeError, ValueError, IndexError):
        raise ServerRefused(f"{address} brought no map of a cluster") from None
    if not ranges:
        raise StoreFault(f"{address} is of a cluster without hash slots")
    return ranges


def _range_untrusted(found: Any, asked: Address) -> tuple[int, int, Address]:  # noqa: ANN401 - checked here
    first, last, (host, port, *_), *_ = found
    # A node that does not know its own name leaves it empty: it is the one that was queried.
    name = _text_of(host or b"") or asked.host
    return int(first), int(last), Address(name, int(port))


async def _ask_sentinel(client: RedisClient, master: str, address: Address) -> Address:
    async with client.asking(address, is_sentinel=True) as ask:
        found = await ask("SENTINEL", "GET-MASTER-ADDR-BY-NAME", master)
    if not found:
        raise StoreFault(f"sentinel {address} knows no master {master!r}")
    try:
        host, port = found
        return Address(_text_of(host), int(port))
    except (TypeError, ValueError):
        raise ServerRefused(f"sentinel {address} named no address") from None


def _memory_untrusted(found: Any, asked: Address) -> tuple[int, int]:  # noqa: ANN401 - checked here
    """Return the memory that a server uses, and its limit: 0 for none."""
    lines = re.findall(r"^(used_memory|maxmemory):(\d{1,18})\r?$", _text_of(found), re.MULTILINE)
    fields = dict(lines)
    try:
        return int(fields["used_memory"]), int(fields["maxmemory"])
    except KeyError:
        raise ServerRefused(f"{asked} reports no memory") from None


def _text_of(reply: object) -> str:
    """Return a server's reply as printable text."""
    if isinstance(reply, bytes):
        return reply.decode("utf-8", "backslashreplace")
    return str(reply)


async def _first_answer(addresses: Sequence[Address], ask: Callable[[Address], Any]) -> Any:  # noqa: ANN401 - what ``ask`` returns
    """Query the servers in order until one answers. Raises the last one's ``StoreFault``."""
    problem = StoreFault("no server is known")
    for address in addresses:
        try:
            return await ask(address)
        except StoreFault as fault:
            problem = fault
    raise problem
