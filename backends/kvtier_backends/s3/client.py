"""Wraps the object store's client library: the only file that uses ``obstore``.

Its calls run in threads of its own. A tier has its retries off: ours know the deadline, and
distinguish a busy server from one that is gone. Whatever it raises, including a panic of its
native code, becomes ``RequestFailed``.
"""

from __future__ import annotations

import asyncio
from base64 import b64decode, b64encode
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeVar, cast

from kvtier.errors import ConfigError
from kvtier.plugin_api.extras import install
from kvtier.plugin_api.threads import DaemonThreads
from kvtier_backends.incidents import TierCounters
from kvtier_backends.s3.failures import Failure, RequestFailed, WrongLength, failure_of
from kvtier_backends.s3.library_threads import THREADS
from kvtier_backends.shared.secrets import SECRETS_S_MAX

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence

    from obstore.store import ObjectStore

    from kvtier_backends.s3.s3_options import Address, Credentials, S3Options, Source

T = TypeVar("T")

CONNECT_TIMEOUT_S_MAX: Final = 5.0
LISTED_AT_ONCE: Final = 1000  # the most that a request returns
_NOT_IMPLEMENTED: Final = 501
_TRAILER: Final = "kvtier"
"""Name of the metadata with the trailer, ``x-amz-meta-kvtier`` on S3. Azure takes letters,
digits and underscores only."""


class FoundObject(NamedTuple):
    """An object that was read."""

    body: memoryview
    trailer: bytes  #: empty if it has none, or an invalid one


class ListedObject(NamedTuple):
    """An object in a listing."""

    name: str
    size: int
    stored_s: float  #: seconds since 1970


class S3Client:
    """Requests to one bucket. Loop thread only; each call raises ``RequestFailed``."""

    def __init__(
        self, make_store: Callable[[Credentials | None], ObjectStore], source: Source
    ) -> None:
        """``make_store``: raises ``ConfigError`` if it can't be made, as ``source`` does."""
        self._make_store = make_store
        self._source = source
        self._credentials = source()
        self._threads = DaemonThreads(1, "kvtier-s3-keys")  # files and commands may hang
        self._store = make_store(self._credentials)
        import obstore  # noqa: PLC0415 - an extra: only those who use the tier have it

        self._library = obstore
        self._sent = TierCounters()
        self._has_conditional_put = True

    def counts(self) -> Mapping[str, int]:
        """Return the requests sent, by kind, also failed ones, and the bytes of bodies. No zeros.

        Any thread.
        """
        return self._sent.counts()

    def forget_connections(self) -> None:
        """Use new connections for further requests; running ones keep theirs.

        The library keeps idle connections. After one has brought no answer the others are no
        better, and each of them would cost a request all its time.
        """
        with suppress(ConfigError):  # the environment has changed: the old store stays
            self._store = self._make_store(self._credentials)

    async def renew(self) -> None:
        """Sign further requests with the current credentials.

        Raises ``RequestFailed`` if there are none: the old ones are kept.
        """
        try:
            async with asyncio.timeout(SECRETS_S_MAX):
                self._credentials = await self._threads.run(self._source)
        except (ConfigError, OSError) as problem:  # TimeoutError, too
            reason = str(problem) or "the credentials could not be read in time"
            raise RequestFailed(Failure.CREDENTIALS, reason) from None
        self.forget_connections()

    def close(self) -> None:
        """Let the thread that reads credentials end."""
        self._threads.stop()

    async def get(self, name: str, is_length: Callable[[int], bool]) -> FoundObject:
        """Return an object of an accepted length. Also raises ``WrongLength``."""
        self._sent.add("requests_get")
        result = await _call(lambda: self._library.get_async(self._store, name))
        length = result.meta["size"]
        if not is_length(length):
            raise WrongLength(f"an object of {length} bytes")
        body = memoryview(await _call(result.bytes_async))
        self._sent.add("bytes_got", body.nbytes)
        # Not the announced length: the library checks that, too, but has had gaps there.
        if body.nbytes != length:
            raise WrongLength(f"{body.nbytes} of {length} bytes")
        return FoundObject(body, _trailer_untrusted(result.attributes))

    async def get_up_to(self, name: str, length_max: int) -> memoryview:
        """Return an object of at most this length. Also raises ``WrongLength``."""
        return (await self.get(name, lambda length: length <= length_max)).body

    async def put(self, name: str, body: memoryview | bytes, trailer: bytes | None = None) -> bool:
        """Create an object, with the trailer in its metadata. Returns False if it exists.

        If the server has no conditional put, an existing object is replaced.
        """
        attributes = {_TRAILER: b64encode(trailer).decode()} if trailer is not None else None
        try:
            await self._put(name, body, create=self._has_conditional_put, attributes=attributes)
        except RequestFailed as failed:
            if failed.failure is Failure.EXISTS:
                return False
            if failed.status != _NOT_IMPLEMENTED or not self._has_conditional_put:
                raise
            self._has_conditional_put = False
            await self._put(name, body, create=False, attributes=attributes)
        return True

    async def replace(self, name: str, body: bytes) -> None:
        """Create an object, or replace it."""
        await self._put(name, body, create=False)

    async def length(self, name: str) -> int | None:
        """Return an object's length, None if there is none."""
        self._sent.add("requests_head")
        try:
            meta = await _call(lambda: self._library.head_async(self._store, name))
        except RequestFailed as failed:
            if failed.failure is Failure.ABSENT:
                return None
            raise
        return int(meta["size"])

    async def walk(self, prefix: str) -> AsyncIterator[Sequence[ListedObject]]:
        """Yield the objects whose names begin with this and a slash, in pages."""
        pages = self._library.list(self._store, prefix or None, chunk_size=LISTED_AT_ONCE)
        while True:
            self._sent.add("requests_list")
            try:
                page = await _call(pages.__anext__)
            except StopAsyncIteration:
                return
            yield [
                ListedObject(each["path"], each["size"], each["last_modified"].timestamp())
                for each in page
            ]

    async def folders(self, prefix: str) -> Sequence[str]:
        """Return what stands between this and the next slash in objects' names, each once."""
        self._sent.add("requests_list")
        library, store = self._library, self._store
        found = await _call(lambda: library.list_with_delimiter_async(store, prefix or None))
        return [each.rpartition("/")[2] for each in found["common_prefixes"]]

    async def remove(self, names: Sequence[str]) -> None:
        """Remove these objects. Missing ones are not an error."""
        self._sent.add("requests_delete")
        try:
            await _call(lambda: self._library.delete_async(self._store, list(names)))
        except RequestFailed as failed:
            if failed.failure is not Failure.ABSENT:
                raise
            if len(names) > 1:  # GCS and Azure stop at the first missing one
                for name in names:
                    await self.remove([name])

    async def _put(
        self,
        name: str,
        body: memoryview | bytes,
        *,
        create: bool,
        attributes: Mapping[str, str] | None = None,
    ) -> None:
        mode: Literal["create", "overwrite"] = "create" if create else "overwrite"
        named: dict[str, Any] = {"mode": mode, "attributes": attributes, "use_multipart": False}
        self._sent.add("requests_put")
        await _call(lambda: self._library.put_async(self._store, name, body, **named))
        self._sent.add("bytes_put", len(body))


def make_store(
    given: S3Options,
    address: Address,
    credentials: Credentials | None,
    where: str,
    *,
    retries_max: int = 0,
) -> ObjectStore:
    """Return the library's store, which has sent nothing yet. Raises ``ConfigError``."""
    try:
        from obstore import store  # noqa: PLC0415 - an extra
    except ImportError:
        raise ConfigError(
            f"{where}: type='s3' needs the library obstore, which is not installed: "
            f"{install('s3')}."
        ) from None
    kinds: dict[str, Callable[..., ObjectStore]] = {
        "s3": store.S3Store,
        "gs": store.GCSStore,
        "az": store.AzureStore,
    }
    settings = _settings(given, address, credentials)
    try:
        return kinds[address.scheme](address.bucket, **settings, **_transport(given, retries_max))
    except Exception as error:  # noqa: BLE001 - it has many kinds, and its text may hold a secret
        raise ConfigError(
            f"{where}: url={str(address)!r} cannot be used: obstore says {type(error).__name__}. "
            "Check the environment variables with the credentials, and the region."
        ) from None


def _settings(
    given: S3Options, address: Address, credentials: Credentials | None
) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    if address.endpoint is not None:
        endpoint = address.endpoint
        if given.virtual_hosted_style:  # the library leaves the bucket's name to the caller then
            endpoint = endpoint.replace("://", f"://{address.bucket}.", 1)
        settings["base_url" if address.scheme == "gs" else "endpoint"] = endpoint
    if address.scheme != "s3":
        return settings
    settings["virtual_hosted_style_request"] = given.virtual_hosted_style
    settings["unsigned_payload"] = given.unsigned_payload
    if given.region is not None:
        settings["region"] = given.region
    if credentials is not None:
        settings["access_key_id"] = credentials.access_key
        settings["secret_access_key"] = credentials.secret_key
        if credentials.session_token is not None:
            settings["session_token"] = credentials.session_token
    return settings


def _transport(given: S3Options, retries_max: int) -> dict[str, Any]:
    timeout_s = given.request_timeout_s
    return {
        "client_options": {
            "allow_http": given.allow_http,
            "timeout": timedelta(seconds=timeout_s),
            "connect_timeout": timedelta(seconds=min(timeout_s, CONNECT_TIMEOUT_S_MAX)),
            "pool_max_idle_per_host": str(given.requests_max),
        },
        "retry_config": {
            "max_retries": retries_max,
            "retry_timeout": timedelta(seconds=timeout_s),
        },
    }


def _trailer_untrusted(attributes: Mapping[str, str]) -> bytes:
    """Return the trailer from an object's metadata; empty if it is not valid."""
    try:
        return b64decode(attributes.get(_TRAILER, ""), validate=True)
    except ValueError:
        return b""


async def _call(start: Callable[[], Awaitable[T]]) -> T:
    """Start a call of the library and wait for it. Raises ``RequestFailed``."""
    if THREADS.is_ending:
        raise RequestFailed(Failure.UNREACHABLE, "this process ends")
    try:
        return await THREADS.watch(cast("asyncio.Future[T]", start()))
    except (
        asyncio.CancelledError,
        GeneratorExit,
        KeyboardInterrupt,
        StopAsyncIteration,
        SystemExit,
    ):
        raise
    except BaseException as error:  # noqa: BLE001 - a panic of its native code is no Exception
        raise failure_of(error) from None
