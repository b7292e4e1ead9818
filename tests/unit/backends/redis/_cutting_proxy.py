"""A server's address that passes so many bytes of its replies, and then ends or holds them up."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

from stress.remote.moving_name import Relay
from tests.support.redis_servers import HOST

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

_STEP_BYTES = 4096


class CuttingProxy(Relay):
    """Passes everything until it is told how much of the replies is left to pass."""

    def __init__(self, target_port: int) -> None:
        super().__init__(target_port)
        self.left_bytes: int | None = None  #: None: no end
        self.goes_on: asyncio.Event | None = None  #: wait for this at the end; None: drop it
        self.is_holding = False
        self.port = 0

    @property
    def url(self) -> str:
        return f"redis://{HOST}:{self.port}"

    async def pass_replies(
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
