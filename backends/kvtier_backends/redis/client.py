"""Wraps the client library: connecting, TLS, logging in, and the rare commands.

``valkey`` is imported here and nowhere else. Once a connection is logged in, its socket is
handed to ``resp.RespConnection``, which runs the batches.

The library's cluster client is not used: on three nodes it moved blocks of 64 KiB and 1 MiB at 0.24
to 0.67 of the speed of ``resp``, in twice the processor time, and needs the right to ``COMMAND``.
Its map of a cluster alone keeps the event loop for 10 ms instead of 4 ms, and hides the error with
which a server refuses. Its sentinel client replaces one command by a longer one.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from kvtier.errors import StoreFault
from kvtier.plugin_api.extras import install
from kvtier.plugin_api.threads import DaemonThreads
from kvtier_backends.redis.resp import RespConnection
from kvtier_backends.redis.server_errors import MAXCLIENTS, error_code
from kvtier_backends.shared.secrets import SECRETS_S_MAX

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    from valkey.asyncio.connection import AbstractConnection

    from kvtier.plugin_api.options import Options
    from kvtier_backends.redis.redis_options import Address, Credentials, RedisOptions

    Commands = Callable[[Sequence[tuple[str | bytes, ...]]], Awaitable[list[Any]]]


class ServerRefused(StoreFault):
    """Raised for an error reply, or an unexpected reply, of a server."""

    kind: str = ""  #: the library's class of the error; the server's error code if that says more


class RedisClient:
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
        self._refusal = ResponseError  # of one command; the connection stays usable
        self._given = given
        self._threads = DaemonThreads(1, "kvtier-redis-login")  # files and commands may hang
        self._tls = _Tls(library, given) if given.servers.is_tls else None
        if self._tls is not None:
            try:
                self._tls.context()
            except OSError as problem:  # ssl.SSLError too
                key = "tls_cert_file" if given.tls_cert_file else "tls_ca_file"
                remedy = f"can't be used ({problem}). Name files in PEM"
                raise reader.error(key, str(self._tls), remedy) from None

    async def connect(
        self, address: Address, on_lost: Callable[[RespConnection], None]
    ) -> RespConnection:
        """Return a connection that is logged in. Raises ``StoreFault``."""
        given = self._given
        async with self._logged_in(address, given.credentials, given.db, keep=True) as opened:
            transport = opened._writer.transport  # noqa: SLF001 - there is no other way to it
            connection = RespConnection(on_lost, opened._close)  # noqa: SLF001 - as above
            transport.set_protocol(connection)
            connection.connection_made(transport)
            return connection

    @asynccontextmanager
    async def asking(
        self, address: Address, *, is_sentinel: bool = False
    ) -> AsyncIterator[Callable[..., Any]]:
        """Yield a coroutine function that runs one command, over a connection of its own.

        Raises ``StoreFault`` for every failure.
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
        """Yield a coroutine function that runs batches of commands, for as long as it takes.

        It returns their replies, including ``ServerRefused``. Raises ``StoreFault``, also for a
        batch that takes longer than ``call_timeout_s``.
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
        """``keep``: leave it open for its new owner, unless something fails.

        ``is_long``: only connecting has a time limit.
        """
        made: Any = None
        is_done = False
        try:
            made = await self._made(address, credentials, db)
            async with asyncio.timeout(self._given.connect_timeout_s) as limit:
                await made.connect()
                if is_long:
                    limit.reschedule(None)
                yield made
            is_done = True
        except TimeoutError:
            raise StoreFault(f"{address} does not answer") from None
        except self._fault as problem:
            raise _refused(address, problem, credentials) from None
        except OSError as problem:
            raise StoreFault(f"{address}: {problem}") from None
        finally:
            if made is not None and not (keep and is_done):
                await _drop(made)

    async def _made(self, address: Address, credentials: Credentials | None, db: int) -> Any:  # noqa: ANN401 - one of three classes
        """Return a connection that is not connected. Raises ``StoreFault`` without its secrets."""
        password, context = None, None
        if self._tls is not None or (credentials is not None and credentials.source):
            # Not part of the connect timeout: a command may fetch a token from far away.
            async with asyncio.timeout(SECRETS_S_MAX):
                password, context = await self._threads.run(partial(self._secrets, credentials))
        named: dict[str, Any] = {
            "db": db,
            "username": credentials and credentials.username,
            "password": password,
            # Each call has one overall time limit.
            "socket_timeout": None,
            "socket_connect_timeout": self._given.connect_timeout_s,
            "lib_name": None,
            "lib_version": None,
        }
        if address.path:
            return self._library.UnixDomainSocketConnection(path=address.path, **named)
        named |= {"host": address.host, "port": address.port, "socket_keepalive": True}
        if context is None:
            return self._library.Connection(**named)
        made = self._library.SSLConnection(**named)
        made.ssl_context = context  # shared by all: creating it reads the system's certificates
        return made

    def _secrets(self, credentials: Credentials | None) -> tuple[str | None, Any]:
        """Read the password, and the TLS files if they have changed. May block."""
        password = None if credentials is None else credentials.password()
        try:
            return password, None if self._tls is None else self._tls.context()
        except OSError as problem:
            raise StoreFault(f"{self._tls} can't be used ({problem})") from None

    def close(self) -> None:
        """Let the thread that reads secrets end."""
        self._threads.stop()


def _refused(
    address: Address, problem: Exception, credentials: Credentials | None = None
) -> ServerRefused:
    name = type(problem).__name__
    told = ""
    if credentials is not None and credentials.source and name == "AuthenticationError":
        credentials.on_refused()
        told = f" ({credentials.source} still has the refused ones)"
    refused = ServerRefused(f"{address}: {name}: {problem}{told}")
    code = error_code(str(problem))
    refused.kind = code if name == "ResponseError" or code == MAXCLIENTS else name
    return refused


async def _drop(connection: AbstractConnection) -> None:
    """Close the connection that the library still holds. Does not wait."""
    writer = connection._writer  # noqa: SLF001 - there is no other way to it
    if writer is not None:
        writer.transport.abort()
    await connection.disconnect(nowait=True)


class _Tls:
    """The TLS context, rebuilt once one of its files has changed."""

    def __init__(self, library: Any, given: RedisOptions) -> None:  # noqa: ANN401 - the library's
        self._library = library
        self._given = given
        self._files = [
            each
            for each in (given.tls_ca_file, given.tls_cert_file, given.tls_key_file)
            if each is not None
        ]
        self._made_of: list[tuple[int, int, int]] | None = None
        self._context: Any = None

    def context(self) -> Any:  # noqa: ANN401 - the library's
        """Return the context. May block. Raises ``OSError``, also for unusable files."""
        stamps = [_stamp(each) for each in self._files]
        if stamps != self._made_of:
            self._context = self._make()
            self._made_of = stamps
        return self._context

    def __str__(self) -> str:
        """Return the files' names."""
        return ", ".join(self._files)

    def _make(self) -> Any:  # noqa: ANN401 - the library's
        context = self._library.ValkeySSLContext(
            keyfile=self._given.tls_key_file,
            certfile=self._given.tls_cert_file,
            cert_reqs="required",
            ca_certs=self._given.tls_ca_file,
            check_hostname=self._given.tls_check_hostname,
        )
        context.get()
        return context


def _stamp(path: str) -> tuple[int, int, int]:
    found = os.stat(path)
    return found.st_mtime_ns, found.st_size, found.st_ino
