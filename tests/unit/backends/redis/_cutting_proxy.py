"""A server's address that passes so many bytes of its replies, and then ends or holds them up."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

from tests.support.redis_servers import HOST

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

_STEP_BYTES = 4096


class CuttingProxy:
    """Passes everything until it is told how much of the replies is left to pass."""

    def __init__(self, target_port: int) -> None:
        self.target_port = target_port  #: of connections that come from now on
        self.left_bytes: int | None = None  #: None: no end
        self.goes_on: asyncio.Event | None = None  #: wait for this at the end; None: drop it
        self.is_holding = False
        self.port = 0
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"redis://{HOST}:{self.port}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            far_reader, far_writer = await asyncio.open_connection(HOST, self.target_port)
            there = asyncio.create_task(self._pass(reader, far_writer))
            try:
                await self._pass_replies(far_reader, writer)
            finally:
                there.cancel()
                far_writer.transport.abort()
        finally:
            writer.transport.abort()
            self._tasks.discard(task)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(_STEP_BYTES):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def _pass_replies(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(_STEP_BYTES):
                passed = data[: self.left_bytes]  # all, if it is None
                writer.write(passed)
                await writer.drain()
                if self.left_bytes is None:
                    continue
                self.left_bytes -= len(passed)
                if self.left_bytes == 0:
                    if self.goes_on is None:
                        return
                    self.left_bytes = None
                    self.is_holding = True
                    await self.goes_on.wait()
                    writer.write(data[len(passed) :])

    async def end(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def cutting_proxy(target_port: int) -> AsyncIterator[CuttingProxy]:
    proxy = CuttingProxy(target_port)
    server = await asyncio.start_server(proxy.serve, HOST, 0)
    proxy.port = server.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        server.close()
        await proxy.end()
        await asyncio.sleep(0)  # what was aborted is closed
