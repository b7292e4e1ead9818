"""Tracks which servers have which blocks, and checks again when that may have changed.

Each check queries the topology, logs in, and compares the description of the namespace with
the engine's own. One connection is kept only to notice at once when its server ends it.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from kvtier.errors import StoreFault
from kvtier.plugin_api.backend import Connection
from kvtier_backends.redis.topology import discover
from kvtier_backends.shared.kept_connection import KeptConnection

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from kvtier_backends.incidents import TierCounters
    from kvtier_backends.redis import resp
    from kvtier_backends.redis.client import RedisClient
    from kvtier_backends.redis.description import Description
    from kvtier_backends.redis.redis_options import Address, RedisOptions
    from kvtier_backends.redis.topology import Topology

CHECK_S: Final = 10.0


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
        topology = await discover(self._client, self._given)
        address = await self._description.compare(self._client, topology)
        if self._kept is None or self._kept_at != address:
            self._drop_kept()
            self._kept = await self._client.connect(address, self._kept_ended)
            self._kept_at = address
        self._topology = topology
        self._on_servers(topology.addresses)

    def _release(self) -> None:
        self._on_servers(())
        self._drop_kept()

    def _kept_ended(self, _connection: resp.RespConnection) -> None:
        self._kept = None
        self.doubt()

    def _drop_kept(self) -> None:
        if self._kept is not None:
            self._kept.abort()
            self._kept = None
