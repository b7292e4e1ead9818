"""One address that leads to one server now and to another later: a primary endpoint, a service.

Connections that are there stay with the server that they were made to, as with a name that is
resolved anew.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Self

from stress.ports import HOST
from stress.remote.beside import answer

if TYPE_CHECKING:
    from types import TracebackType

_PIECE_BYTES: Final = 1 << 18


class MovingName:
    """Listens at ``port`` while it is used as a context; ``leads_to`` may be set by any thread."""

    def __init__(self, leads_to: int) -> None:
        """``leads_to``: the port of the server that new connections get."""
        self.leads_to = leads_to
        self.port = 0
        self._is_listening = threading.Event()
        self._loop: asyncio.AbstractEventLoop
        self._is_over: asyncio.Event
        self._connections: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    def __enter__(self) -> Self:
        """Begin to listen."""
        self._thread.start()
        self._is_listening.wait()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End all connections, and stop."""
        self._loop.call_soon_threadsafe(self._is_over.set)
        self._thread.join()

    async def _serve(self) -> None:
        self._loop, self._is_over = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._connected, HOST, 0)
        self.port = server.sockets[0].getsockname()[1]
        self._is_listening.set()
        await self._is_over.wait()
        server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            with suppress(OSError):  # nobody listens there just now
                far_reader, far_writer = await asyncio.open_connection(HOST, self.leads_to)
                try:
                    await _both_ways((reader, far_writer), (far_reader, writer))
                finally:
                    far_writer.transport.abort()
        finally:
            writer.transport.abort()
            self._connections.discard(task)


async def _both_ways(*ways: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> None:
    """Copy until one side has ended."""
    copying = [asyncio.create_task(_copy(*way)) for way in ways]
    try:
        await asyncio.wait(copying, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in copying:
            task.cancel()
        await asyncio.gather(*copying, return_exceptions=True)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while piece := await reader.read(_PIECE_BYTES):
            writer.write(piece)
            await writer.drain()


if __name__ == "__main__":
    with MovingName(int(sys.argv[1])) as name:
        answer(name.port, lambda words: setattr(name, "leads_to", int(words[0])))
