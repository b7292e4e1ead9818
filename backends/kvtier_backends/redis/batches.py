"""Runs one call's commands, each at the server that has the block, within the call's time."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import TYPE_CHECKING

from kvtier.errors import StoreFault
from kvtier.plugin_api.deadlines import time_left_s
from kvtier_backends.redis.server_errors import Route, error_of
from kvtier_backends.redis.topology import HOPS_MAX, Target, onward_untrusted, redirected

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvtier_backends.redis.pool import ConnectionPool
    from kvtier_backends.redis.redis_options import Address
    from kvtier_backends.redis.resp import Command, Reply
    from kvtier_backends.redis.topology import Topology
    from kvtier_backends.redis.watch import ConnectionWatch


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
