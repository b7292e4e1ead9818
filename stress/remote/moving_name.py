"""One address that leads to one server now and to another later: a primary endpoint, a service.

Connections that are there stay with the server that they were made to, as with a name that is
resolved anew.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Self

from stress.ports import HOST

if TYPE_CHECKING:
    from collections.abc import Iterator

_PIECE_BYTES: Final = 1 << 18


class Relay:
    """Passes connections on to the server at ``leads_to``. Loop thread only."""

    def __init__(self, leads_to: int) -> None:
        """``leads_to``: the port of the server that new connections get."""
        self.leads_to = leads_to
        self._connections: set[asyncio.Task[None]] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass a connection on until the server ends it: for ``asyncio.start_server``."""
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            with suppress(OSError):  # nobody listens there just now
                far_reader, far_writer = await asyncio.open_connection(HOST, self.leads_to)
                there = asyncio.create_task(_pass(reader, far_writer))
                try:
                    await self.pass_replies(far_reader, writer)
                finally:
                    there.cancel()
                    far_writer.transport.abort()
        finally:
            writer.transport.abort()
            self._connections.discard(task)

    async def pass_replies(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Pass on what a server says."""
        await _pass(reader, writer)

    async def end(self) -> None:
        """End all connections."""
        tasks = list(self._connections)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class MovingName:
    """A relay in a thread of its own. It listens at ``port`` while it is used as a context."""

    def __init__(self, leads_to: int) -> None:
        """``leads_to``: as ``Relay`` has it."""
        self._relay = Relay(leads_to)
        self.port = 0
        self._is_listening = threading.Event()
        self._loop: asyncio.AbstractEventLoop
        self._is_over: asyncio.Event
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    def lead_to(self, port: int) -> None:
        """Have connections that come from now on go there. Any thread."""
        self._relay.leads_to = port

    def __enter__(self) -> Self:
        """Begin to listen."""
        self._thread.start()
        self._is_listening.wait()
        return self

    def __exit__(self, *_: object) -> None:
        """End all connections, and stop."""
        self._loop.call_soon_threadsafe(self._is_over.set)
        self._thread.join()

    async def _serve(self) -> None:
        self._loop, self._is_over = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._relay.serve, HOST, 0)
        self.port = server.sockets[0].getsockname()[1]
        self._is_listening.set()
        await self._is_over.wait()
        server.close()
        await self._relay.end()


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while piece := await reader.read(_PIECE_BYTES):
            writer.write(piece)
            await writer.drain()
    writer.close()


def main(job: dict[str, int]) -> Iterator[int | None]:
    """Be such a name beside a soak: give its port, then lead where each order says."""
    with MovingName(job["leads_to"]) as name:
        yield name.port
        for line in sys.stdin:
            name.lead_to(json.loads(line)["leads_to"])
            yield None
