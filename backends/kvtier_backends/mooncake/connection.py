"""Connects to the master: sets up a client, watches it, and keeps it as long as its tier lives.

``UP``: the client's last heartbeat and the last call reached the master. After that the client
reconnects by itself, and is polled until it has.

``setup`` holds the GIL while it waits, so ``knock`` tries the master first, which does not. This
holds for all releases up to 0.3.13.post1, the lowest that kvtier accepts, and the latest so far
(measured: 9 s in which no other thread ran). The one that has Mooncake#3947 releases it. Once
that is the lowest, ``knock`` is needed only for the address that it returns.

If masters elect one, ``knock`` tries the servers that record the elected one. If these answer,
and the elected one does not, ``setup`` waits for it all the same: the tier has its own process.
"""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from kvtier.errors import StoreFault
from kvtier.plugin_api.backend import Connection
from kvtier.plugin_api.threads import DaemonThreads
from kvtier_backends.mooncake.client import StoreClient
from kvtier_backends.shared.kept_connection import KeptConnection

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtier_backends.incidents import TierCounters
    from kvtier_backends.mooncake.mooncake_options import MooncakeOptions
    from kvtier_backends.mooncake.namespace_object import NamespaceObject
    from kvtier_backends.mooncake.registered import RegisteredMemory

WATCH_S: Final = 1.0
"""Same interval as the client's heartbeats, which are checked here."""

_UNANSWERED: Final = "the master does not answer"


class MasterConnection(KeptConnection):
    """The client of one store, as long as its tier lives.

    Loop thread only, except for ``note_unanswered``.
    """

    def __init__(
        self,
        library: Any,  # noqa: ANN401 - a module without types
        options: MooncakeOptions,
        memory: RegisteredMemory,
        namespace: NamespaceObject,
        counters: TierCounters,
        *,
        tier_name: str,
    ) -> None:
        super().__init__("mooncake", tier_name, options.place, counters)
        self._check_every_s = WATCH_S
        self._library = library
        self._options = options
        self._memory = memory
        self._namespace = namespace
        self._client: StoreClient | None = None
        self._threads = DaemonThreads(1, f"{tier_name}-connect")
        self._enders = DaemonThreads(1, f"{tier_name}-end")
        self._loop: asyncio.AbstractEventLoop
        self._is_closed = False

    @property
    def client(self) -> StoreClient | None:
        """The client to call now; None while there is none, or the master is gone."""
        return self._client if self.state is Connection.UP else None

    def start(self, on_state: Callable[[Connection], None]) -> None:
        """Begin to connect."""
        self._loop = asyncio.get_running_loop()
        super().start(on_state)

    def note_unanswered(self) -> None:
        """Note that a call did not reach the master. Any thread."""
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self.lose, StoreFault(_UNANSWERED))

    async def register(self) -> None:
        """Register new memory with the client, if it is up. Raises ``StoreFault``.

        Otherwise the memory is registered before the client is up.
        """
        if self.client is not None:
            await self._threads.run(partial(self._register, self.client))

    async def stop(self) -> None:
        """Stop, and close the client once its calls have returned, without waiting for them."""
        self._is_closed = True
        await super().stop()
        if self._client is not None:
            await self._enders.run(self._client.end)
        self._threads.stop()
        self._enders.stop()

    async def _connect(self) -> None:
        await self._threads.run(self._reach)
        while self._client is None or not self._client.knows(self._memory.regions()):
            await self._threads.run(self._reach)  # the slots became known meanwhile

    async def _check(self) -> None:
        if self._client is None or not self._client.is_healthy():
            raise StoreFault(_UNANSWERED)
        if not self._namespace.is_settled:  # for example, the store had no room for it
            await self._threads.run(partial(self._namespace.compare, self._client))

    # --- in the thread ---

    def _reach(self) -> None:
        """Connect a client to the master: the existing one, or a new one.

        Raises ``StoreFault`` while that fails.
        """
        local_address = knock(self._options)
        client = self._client
        if client is not None and client.is_ending:
            client.wait_until_ended()  # two clients must not write to one buffer
            client = self._client = None
        if client is None:
            client = StoreClient(
                self._library, self._options, self._options.local_hostname or local_address
            )
            self._client = client
            if self._is_closed:  # meanwhile: nothing else would end it
                client.end()
        elif not client.is_healthy():
            raise StoreFault("the client has not reconnected to the master yet")
        self._register(client)
        self._namespace.compare(client)

    def _register(self, client: StoreClient) -> None:
        for region in self._memory.regions():
            client.register(region)


def knock(options: MooncakeOptions) -> str:
    """Return the local address that reaches the master. Raises ``StoreFault``.

    If masters elect one, the first answering server that knows the elected one is used.
    """
    problems = []
    for address in options.knock_addresses:
        try:
            with socket.create_connection(address, options.timeout_s) as connection:
                found: str = connection.getsockname()[0]
        except OSError as problem:
            problems.append(str(problem))
        else:
            return found
    raise StoreFault("; ".join(problems))
