"""What the client library does: connecting, TLS, logging in, and the rare commands.

``valkey`` is imported here and nowhere else. Once a connection is logged in, its socket is
handed to ``resp.Connection``, which runs the batches.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from kvtier.errors import StoreFault
from kvtier.plugin_api.extras import install
from kvtier_backends.redis.resp import Connection

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    from valkey.asyncio.connection import AbstractConnection

    from kvtier.plugin_api.options import Options
    from kvtier_backends.redis.addresses import Address
    from kvtier_backends.redis.credentials import Credentials
    from kvtier_backends.redis.redis_options import RedisOptions

    Commands = Callable[[Sequence[tuple[str | bytes, ...]]], Awaitable[list[Any]]]


class ServerRefused(StoreFault):
    """Raised for what a server answers with an error, or with what it should not."""

    kind: str = ""  #: the library's class of the error; the server's word where it has no class


class Client:
    """Makes connections to any server of the tier. Loop thread only."""

    def __init__(self, given: RedisOptions, reader: Options) -> None:
        """Raises ``ConfigError`` without the library, or for certificates that can't be read."""
        try:
            import valkey.asyncio.connection as library  # noqa: PLC0415 - an extra
            from valkey.crc import key_slot  # noqa: PLC0415 - an extra
            from valkey.exceptions import ResponseError, ValkeyError  # noqa: PLC0415 - an extra
        except ImportError:
            raise reader.error(
                "type", "redis", f"needs a client library: {install('redis')}"
            ) from None
        self.key_slot: Callable[[bytes], int] = key_slot
        self._library = library
        self._fault = ValkeyError
        self._refusal = ResponseError  # of one command; the connection goes on
        self._given = given
        self._ssl: Any = _ssl_context(library, given, reader) if given.servers.is_tls else None

    async def connect(self, address: Address, on_lost: Callable[[Connection], None]) -> Connection:
        """Return a connection that is logged in. Raises ``StoreFault``."""
        given = self._given
        async with self._logged_in(address, given.credentials, given.db, keep=True) as opened:
            transport = opened._writer.transport  # noqa: SLF001 - there is no other way to it
            connection = Connection(on_lost, opened._close)  # noqa: SLF001 - as above
            transport.set_protocol(connection)
            connection.connection_made(transport)
            return connection

    @asynccontextmanager
    async def asking(
        self, address: Address, *, is_sentinel: bool = False
    ) -> AsyncIterator[Callable[..., Any]]:
        """Give a coroutine that runs one command, over a connection of its own.

        Raises ``StoreFault`` for all that goes wrong.
        """
        given = self._given
        credentials = given.credentials if given.sentinel_auth or not is_sentinel else None
        async with self._logged_in(address, credentials, 0 if is_sentinel else given.db) as opened:

            async def ask(*words: str | bytes) -> Any:  # noqa: ANN401 - what the server says
                await opened.send_command(*words)
                try:
                    return await opened.read_response(disconnect_on_error=False)
                except self._fault as problem:
                    raise _refused(address, problem) from None

            yield ask

    @asynccontextmanager
    async def commanding(self, address: Address) -> AsyncIterator[Commands]:
        """Give a coroutine that runs commands in one go, for as long as it takes.

        It returns their answers, ``ServerRefused`` among them. Raises ``StoreFault``, also for a
        go that takes longer than ``call_timeout_s``.
        """
        given = self._given
        async with self._logged_in(address, given.credentials, given.db, is_long=True) as opened:

            async def run(commands: Sequence[tuple[str | bytes, ...]]) -> list[Any]:
                async with asyncio.timeout(given.call_timeout_s):
                    await opened.send_packed_command(opened.pack_commands(commands))
                    return [await answer() for _ in commands]

            async def answer() -> Any:  # noqa: ANN401 - what the server says
                try:
                    return await opened.read_response(disconnect_on_error=False)
                except self._refusal as problem:
                    return _refused(address, problem)

            yield run

    @asynccontextmanager
    async def _logged_in(
        self,
        address: Address,
        credentials: Credentials | None,
        db: int,
        *,
        keep: bool = False,
        is_long: bool = False,
    ) -> AsyncIterator[Any]:
        """``keep``: leave it open for whoever has taken it over, if nothing goes wrong.

        ``is_long``: only connecting has a limit.
        """
        made = self._make(address, credentials, db)
        is_done = False
        try:
            async with asyncio.timeout(self._given.connect_timeout_s) as limit:
                await made.connect()
                if is_long:
                    limit.reschedule(None)
                yield made
            is_done = True
        except TimeoutError:
            raise StoreFault(f"{address} does not answer") from None
        except self._fault as problem:
            raise _refused(address, problem) from None
        except OSError as problem:
            raise StoreFault(f"{address}: {problem}") from None
        finally:
            if not (keep and is_done):
                await _drop(made)

    def _make(self, address: Address, credentials: Credentials | None, db: int) -> Any:  # noqa: ANN401 - one of three classes
        named: dict[str, Any] = {
            "db": db,
            "username": credentials and credentials.username,
            "password": credentials and credentials.password,
            # Each call has one limit for all that it does.
            "socket_timeout": None,
            "socket_connect_timeout": self._given.connect_timeout_s,
            "lib_name": None,
            "lib_version": None,
        }
        if address.path:
            return self._library.UnixDomainSocketConnection(path=address.path, **named)
        named |= {"host": address.host, "port": address.port, "socket_keepalive": True}
        if self._ssl is None:
            return self._library.Connection(**named)
        made = self._library.SSLConnection(**named)
        made.ssl_context = self._ssl  # one for all: to make it reads the system's certificates
        return made


def _refused(address: Address, problem: Exception) -> ServerRefused:
    refused = ServerRefused(f"{address}: {type(problem).__name__}: {problem}")
    name = type(problem).__name__
    refused.kind = name if name != "ResponseError" else str(problem).partition(" ")[0]
    return refused


async def _drop(connection: AbstractConnection) -> None:
    """Close what the library still holds. Does not wait."""
    writer = connection._writer  # noqa: SLF001 - there is no other way to it
    if writer is not None:
        writer.transport.abort()
    await connection.disconnect(nowait=True)


def _ssl_context(library: Any, given: RedisOptions, reader: Options) -> Any:  # noqa: ANN401 - the library's
    context = library.ValkeySSLContext(
        keyfile=given.tls_key_file,
        certfile=given.tls_cert_file,
        cert_reqs="required",
        ca_certs=given.tls_ca_file,
        check_hostname=given.tls_check_hostname,
    )
    try:
        context.get()
    except OSError as problem:  # ssl.SSLError too
        key = "tls_cert_file" if given.tls_cert_file else "tls_ca_file"
        files = [each for each in (given.tls_ca_file, given.tls_cert_file) if each]
        raise reader.error(
            key, ", ".join(files), f"can't be used ({problem}). Name files in PEM"
        ) from None
    return context
