"""Keeps connections, up to a limit for each server."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from kvtier.errors import StoreFault

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Collection

    from kvtier_backends.redis.client import RedisClient
    from kvtier_backends.redis.redis_options import Address
    from kvtier_backends.redis.resp import RespConnection


class ConnectionPool:
    """Lends connections. Callers limit their own waiting time. Loop thread only."""

    def __init__(
        self, client: RedisClient, connections_max: int, on_lost: Callable[[], None]
    ) -> None:
        """``on_lost``: called when a server ends a connection."""
        self._client = client
        self._on_lost = on_lost
        self._idle: dict[Address, list[RespConnection]] = defaultdict(list)
        self._lent: set[RespConnection] = set()
        self._slots: dict[Address, asyncio.Semaphore] = defaultdict(
            lambda: asyncio.Semaphore(connections_max)
        )
        self._times_left: dict[Address, int] = defaultdict(int)
        self._is_closed = False

    @asynccontextmanager
    async def lend(self, address: Address) -> AsyncIterator[RespConnection]:
        """Lend a connection. If its batch does not end, for any reason, it is closed at once.

        So are the server's idle connections: a network that silently dropped this one dropped those
        too, and each of them would cost a call all its time. Raises ``StoreFault`` if the server
        can't be reached.
        """
        async with self._slots[address]:
            if self._is_closed:
                raise StoreFault("the tier is closed")
            connection = self._idle_one(address)
            times_left = self._times_left[address]
            if connection is None:
                connection = await self._client.connect(address, self._lost)
            self._lent.add(connection)
            try:
                yield connection
            finally:
                self._lent.discard(connection)
                if not connection.is_usable:
                    connection.abort()
                    self._close_idle(address)
                elif times_left == self._times_left[address] and not self._is_closed:
                    self._idle[address].append(connection)
                else:
                    connection.abort()

    def leave(self, address: Address) -> None:
        """Stop using the present connections to this address: they lead to the wrong server.

        The name may lead to another one. Lent connections are closed when they come back.
        """
        self._times_left[address] += 1
        self._close_idle(address)

    def keep_only(self, addresses: Collection[Address]) -> None:
        """Close the idle connections to all other servers."""
        for address in [each for each in self._idle if each not in addresses]:
            self._close_idle(address)

    def close(self) -> None:
        """Close all connections, and the client; calls end. May be called twice."""
        self._is_closed = True
        self.keep_only(())
        for connection in self._lent:
            connection.abort()
        self._client.close()

    def _close_idle(self, address: Address) -> None:
        for connection in self._idle.pop(address, []):
            connection.abort()

    def _idle_one(self, address: Address) -> RespConnection | None:
        idle = self._idle[address]
        while idle:
            connection = idle.pop()
            if connection.is_usable:
                return connection
        return None

    def _lost(self, connection: RespConnection) -> None:
        for idle in self._idle.values():
            if connection in idle:
                idle.remove(connection)
        self._on_lost()
