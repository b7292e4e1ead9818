"""Plain valkey-py: pipelines of GET and SET, and MGET and MSET, over its own pool."""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING, Any, ClassVar, Final

from typing_extensions import override

from kvtier.errors import Misuse, StoreFault
from kvtier.plugin_api.extras import install
from kvtier.tools.bench.plain_clients import PlainClient, expect_blocks
from kvtier_backends.redis.redis_options import read_options

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvtier.plugin_api.backend import BackendContext
    from kvtier_backends.redis.redis_options import RedisOptions

PIPELINES: Final = "pipelines"
MANY_KEYS: Final = "MGET and MSET"
_SCANNED_AT_ONCE: Final = 1000


class PlainRedis(PlainClient):
    """The library that the ``redis`` tier connects with."""

    ways: ClassVar[tuple[str, ...]] = (PIPELINES, MANY_KEYS)

    def __init__(self, options: Mapping[str, Any], context: BackendContext, token: str) -> None:
        super().__init__(options, context, token)
        _, given = read_options(options, context)
        if given.mode != "standalone":
            raise Misuse(
                f"--tier: mode={given.mode!r} is not measured. Name one of the servers as url, "
                "and remove mode."
            )
        self._prefix = f"{given.key_prefix}.bench-{token}"
        self._client: Any = _client(given)
        self.library = f"valkey-py {version('valkey')}"
        if _has_libvalkey():
            self.library += " with libvalkey"

    @override
    def options_of_tier(self, part: str, leg_bytes: int) -> dict[str, Any]:
        return {**self.options, "key_prefix": f"{self._prefix}.{part}"}

    @override
    async def open(self, memory: memoryview) -> None:
        await self._client.ping()

    @override
    async def store(self, way: str, names: Sequence[str], views: Sequence[memoryview]) -> None:
        named = zip(map(self._name, names), views, strict=True)
        if way == MANY_KEYS:
            replies = [await self._client.mset(dict(named))]
        else:
            pipeline = self._client.pipeline(transaction=False)
            for name, view in named:
                pipeline.set(name, view)
            replies = await pipeline.execute()
        if not all(replies):
            raise StoreFault("the plain client could not store a block")

    @override
    async def load(self, way: str, names: Sequence[str], views: Sequence[memoryview]) -> None:
        if way == MANY_KEYS:
            values = await self._client.mget([self._name(name) for name in names])
        else:
            pipeline = self._client.pipeline(transaction=False)
            for name in names:
                pipeline.get(self._name(name))
            values = await pipeline.execute()
        expect_blocks([len(value or b"") for value in values], self.context.block_bytes)

    @override
    async def remove(self, names: Sequence[str]) -> None:
        await self._client.unlink(*map(self._name, names))

    @override
    async def remove_all(self) -> None:
        found = self._client.scan_iter(match=f"{self._prefix}*", count=_SCANNED_AT_ONCE)
        async for name in found:
            await self._client.unlink(name)

    @override
    async def close(self) -> None:
        await self._client.aclose()

    def _name(self, name: str) -> str:
        return f"{self._prefix}:{name}"


def _client(given: RedisOptions) -> Any:  # noqa: ANN401 - the library's
    try:
        from valkey.asyncio import Valkey  # noqa: PLC0415 - an extra
    except ImportError:
        raise Misuse(
            f"--tier: type 'redis' needs a client library. Install it with: {install('redis')}"
        ) from None
    address, credentials = given.servers.addresses[0], given.credentials
    where: dict[str, Any] = {"host": address.host, "port": address.port}
    if address.path:
        where = {"unix_socket_path": address.path}
    if given.servers.is_tls:
        where |= {
            "ssl": True,
            "ssl_ca_certs": given.tls_ca_file,
            "ssl_certfile": given.tls_cert_file,
            "ssl_keyfile": given.tls_key_file,
            "ssl_check_hostname": given.tls_check_hostname,
        }
    return Valkey(
        **where, db=given.db, username=credentials.username, password=credentials.password()
    )


def _has_libvalkey() -> bool:
    from valkey.utils import LIBVALKEY_AVAILABLE  # noqa: PLC0415 - an extra

    return bool(LIBVALKEY_AVAILABLE)
