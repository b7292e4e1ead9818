"""Runs one call's commands, each at the server that has the block, within the call's time.

Connections are kept, up to a limit for each server. While a cluster's hash slots move from one node
to another, its redirections are followed:

MOVED  the hash slot is another node's now: the tier's map is old
ASK    it is being moved, and the key is not here: it may already have arrived at the other
       node, which answers only commands that follow an ``ASKING``
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final, NamedTuple

from kvtier.errors import StoreFault
from kvtier.plugin_api.deadlines import time_left_s
from kvtier_backends.redis.redis_options import Address
from kvtier_backends.redis.resp import Command, ReplyKind, packed
from kvtier_backends.redis.server_errors import Route, error_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence

    from kvtier_backends.redis.client import RedisClient
    from kvtier_backends.redis.resp import Reply, RespConnection
    from kvtier_backends.redis.servers import ConnectionWatch, Topology

HOPS_MAX: Final = 4
"""Most nodes that a command is sent to in turn: nodes that disagree would redirect it forever."""

_ASKING: Final = packed(b"ASKING")


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


class BatchRunner:
    """Runs batches over the pool's connections. Loop thread only."""

    def __init__(self, pool: ConnectionPool, watch: ConnectionWatch, call_timeout_s: float) -> None:
        self._pool = pool
        self._watch = watch
        self._call_timeout_s = call_timeout_s

    async def run(self, commands: Sequence[tuple[bytes, Command]]) -> StoreFault | None:
        """Run commands, each with its block's name; replies are stored in ``Command.reply``.

        Returns the reason if a reply is missing. After it has returned, or was cancelled, nothing
        reads or writes a buffer of the commands any more.
        """
        problems: list[StoreFault] = []
        limit_s = min(time_left_s(), self._call_timeout_s)
        if not commands:
            return None
        if not limit_s:
            return StoreFault("there was no time left")
        try:
            async with asyncio.timeout(limit_s):
                topology = await self._watch.topology()
                at = self._by_target(topology, commands, problems)
                await self._run_all(at, problems)
                for _ in range(HOPS_MAX - 1 if topology.is_cluster else 0):
                    at = redirected(at)
                    await self._run_all(at, problems)
        except TimeoutError:
            self._watch.doubt()
            problems.append(StoreFault("no answer in time"))
        except StoreFault as problem:
            problems.append(problem)
        return problems[0] if problems else None

    def _by_target(
        self,
        topology: Topology,
        commands: Sequence[tuple[bytes, Command]],
        problems: list[StoreFault],
    ) -> dict[Target, list[Command]]:
        if topology.only is not None:
            return {Target(topology.only): [command for _, command in commands]}
        at: dict[Target, list[Command]] = defaultdict(list)
        for name, command in commands:
            address = topology.server_of(name)
            if address is not None:
                at[Target(address)].append(command)
            elif not problems:
                problems.append(StoreFault("no node of the cluster is in charge of a block"))
                self._watch.doubt()
        return at

    async def _run_all(
        self, at: Mapping[Target, list[Command]], problems: list[StoreFault]
    ) -> None:
        if len(at) == 1:
            ((target, only),) = at.items()
            await self._run_at(target, only, problems)
        elif at:
            async with asyncio.TaskGroup() as group:
                for target, some in at.items():
                    group.create_task(self._run_at(target, some, problems))

    async def _run_at(
        self, target: Target, commands: list[Command], problems: list[StoreFault]
    ) -> None:
        try:
            async with self._pool.lend(target.address) as connection:
                await connection.run(target.framed(commands))
        except StoreFault as problem:
            self._watch.doubt()
            problems.append(problem)
        routes = {_route(command.reply, target.address) for command in commands}
        if Route.LEFT in routes:
            self._pool.leave(target.address)
            self._watch.leave()
        elif Route.CHECKED in routes:
            self._watch.doubt()


def _route(reply: Reply | None, asked: Address) -> Route:
    error = error_of(reply)
    if error is None or reply is None:
        return Route.KEPT
    onward = onward_untrusted(reply, asked)
    # A node that redirects to itself is no longer the one that its name leads to.
    is_itself = onward is not None and not onward.is_asked and onward.address == asked
    return Route.LEFT if is_itself else error.route


class Target(NamedTuple):
    """A node to send commands to."""

    address: Address
    is_asked: bool = False  #: its hash slot has not fully arrived there

    def framed(self, commands: Sequence[Command]) -> Sequence[Command]:
        """Return the commands to send."""
        if not self.is_asked:
            return commands
        return [each for command in commands for each in (Command((_ASKING,)), command)]


def redirected(sent: Mapping[Target, Sequence[Command]]) -> dict[Target, list[Command]]:
    """Return the commands to be redirected. Their replies are cleared."""
    further: dict[Target, list[Command]] = defaultdict(list)
    for target, commands in sent.items():
        for command in commands:
            onward = onward_untrusted(command.reply, target.address)
            if onward is not None:
                command.forget_reply()
                further[onward].append(command)
    return further


def onward_untrusted(reply: Reply | None, asked: Address) -> Target | None:
    """Parse ``ASK <slot> <host>:<port>``. None for anything else; raises nothing."""
    if reply is None or reply.kind is not ReplyKind.ERROR:
        return None
    code, _, rest = reply.text.partition(" ")
    host, _, port = rest.partition(" ")[2].rpartition(":")
    if code not in ("ASK", "MOVED") or host == "?" or not (port.isascii() and port.isdigit()):
        return None
    number = int(port[:6])
    if not 0 < number < 1 << 16:
        return None
    # A node that does not know its own name leaves it empty: it is the host that was queried.
    return Target(Address(host.strip("[]") or asked.host, number), code == "ASK")
