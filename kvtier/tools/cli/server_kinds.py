"""The kinds of servers whose blocks ``ls`` and ``purge`` know how to find: one class each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final

from typing_extensions import override

from kvtier.plugin_api.backend import BackendContext, Namespace
from kvtier_backends.redis import addresses, redis_options
from kvtier_backends.redis.client import RedisClient
from kvtier_backends.redis.offline import list_servers, purge_servers
from kvtier_backends.s3 import s3_options
from kvtier_backends.s3.client import S3Client, make_store
from kvtier_backends.s3.credentials import credentials_of
from kvtier_backends.s3.offline import RETRIES_MAX, list_bucket, purge_bucket

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvtier_backends.shared.holdings import Holding, Wanted


class Servers(ABC):
    """The servers of one tier. Calls raise ``StoreFault``."""

    place: str
    tell_age: ClassVar[bool]  #: whether they tell when a block was stored

    @abstractmethod
    async def list(self, advance: Callable[[int], None]) -> dict[str, Holding]:
        """Return what there is, by namespace. ``advance``: called with each number of names."""

    @abstractmethod
    async def purge(
        self,
        wanted: Wanted,
        advance: Callable[[int], None],
        *,
        dry: bool,
    ) -> tuple[dict[str, Holding], int]:
        """Remove blocks. Returns what is gone, and how many could not be removed.

        ``dry``: removes nothing.
        """


class RedisServers(Servers):
    """Redis and Valkey."""

    tell_age: ClassVar[bool] = False

    def __init__(self, entry: Mapping[str, Any]) -> None:
        """Raises ``ConfigError``."""
        reader, self._given = redis_options.read_options(entry, _context("redis"))
        self._client = RedisClient(self._given, reader)
        self.place = self._given.place

    @override
    async def list(self, advance: Callable[[int], None]) -> dict[str, Holding]:
        return await list_servers(self._client, self._given, advance)

    @override
    async def purge(
        self,
        wanted: Wanted,
        advance: Callable[[int], None],
        *,
        dry: bool,
    ) -> tuple[dict[str, Holding], int]:
        assert wanted.before_s is None, "the caller asks tell_age"
        return await purge_servers(self._client, self._given, wanted, advance, dry=dry)


class Bucket(Servers):
    """An object store's bucket."""

    tell_age: ClassVar[bool] = True

    def __init__(self, entry: Mapping[str, Any]) -> None:
        """Raises ``ConfigError``."""
        given, reader = s3_options.read_options(entry, _context("s3"))
        self._address = s3_options.address_of(given, reader)
        credentials = credentials_of(given, reader)
        of_tier = partial(make_store, given, self._address, where=reader.where)
        self._client = S3Client(partial(of_tier, retries_max=RETRIES_MAX), credentials)
        self.place = str(self._address)

    @override
    async def list(self, advance: Callable[[int], None]) -> dict[str, Holding]:
        return await list_bucket(self._client, self._address, advance)

    @override
    async def purge(
        self,
        wanted: Wanted,
        advance: Callable[[int], None],
        *,
        dry: bool,
    ) -> tuple[dict[str, Holding], int]:
        return await purge_bucket(self._client, self._address, wanted, advance, dry=dry)


KINDS: Final[Mapping[str, Callable[[Mapping[str, Any]], Servers]]] = {
    "redis": RedisServers,
    "s3": Bucket,
}


def kind_of_address(address: str) -> str | None:
    """Return the type of tier that has such addresses; None if none has."""
    scheme = address.partition("://")[0]
    if scheme in addresses.SCHEMES:
        return "redis"
    return "s3" if scheme in s3_options.SCHEMES else None


def _context(kind: str) -> BackendContext:
    return BackendContext(1, Namespace({}), kind)
