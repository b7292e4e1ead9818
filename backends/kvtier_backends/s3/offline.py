"""Lists the contents of an ``s3`` tier's bucket by namespace, and purges them, while in use.

A listing names up to a thousand objects a request, with their sizes and when they were stored, and
``DeleteObjects`` removes as many: no block is read.
"""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

from typing_extensions import override

from kvtier.errors import ConfigError
from kvtier.plugin_api.backend import BackendContext, Namespace
from kvtier.plugin_api.offline import NamespaceBlocks
from kvtier_backends.s3.client import S3Client, make_store
from kvtier_backends.s3.failures import Failure, RequestFailed, WrongLength
from kvtier_backends.s3.s3_options import SCHEMES, address_of, credentials_of, read_options
from kvtier_backends.shared.namespaces import (
    DESCRIPTION_BYTES_MAX,
    DescriptionDamaged,
    facts_of,
    parse_description_untrusted,
)
from kvtier_backends.shared.server_storage import ServerStorage

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence

    from kvtier.plugin_api.offline import Selection
    from kvtier_backends.s3.s3_options import Address

RETRIES_MAX: Final = 8
"""No engine waits, and a bucket of a million blocks takes a thousand requests: the library
repeats failed ones."""

PARTS: Final = 1 << 12
"""Of a namespace, for progress: the first three digits of keys spread blocks evenly over them."""

DESCRIPTION: Final = "description.json"
_NAMESPACE: Final = re.compile(r"[A-Za-z0-9._-]+_[0-9a-f]{12}")
_KEY: Final = re.compile(r"(?:[0-9a-f]{2})+")
_SERVER_SAYS_NO: Final = frozenset({Failure.DENIED, Failure.REFUSED})


class _Found(NamedTuple):
    """An object that a tier with this prefix has created."""

    name: str
    namespace: str
    key: bytes | None  #: None: it describes the namespace
    size: int
    stored_s: float


class S3Storage(ServerStorage):
    """The bucket of an object store."""

    schemes: ClassVar[tuple[str, ...]] = SCHEMES

    def __init__(self, client: S3Client, address: Address) -> None:
        self.place = str(address)
        self._client = client
        self._address = address

    @classmethod
    @override
    def from_options(cls, options: Mapping[str, Any]) -> S3Storage:
        given, reader = read_options(options, BackendContext(1, Namespace({}), "s3"))
        address = address_of(given, reader)
        credentials = credentials_of(given, reader)
        of_tier = partial(make_store, given, address, where=reader.where)
        return cls(S3Client(partial(of_tier, retries_max=RETRIES_MAX), credentials), address)

    @override
    async def _size(self) -> int | None:
        """Return the parts of all namespaces."""
        try:
            folders = await self._client.folders(self._address.prefix)
        except RequestFailed as refused:
            if refused.failure not in _SERVER_SAYS_NO:
                raise
            return None
        return PARTS * len([*filter(_NAMESPACE.fullmatch, folders)])

    @override
    async def _list(self, advance: Callable[[int], None]) -> dict[str, NamespaceBlocks]:
        held: dict[str, NamespaceBlocks] = {}
        async for found in _walk(self._client, self._address, advance):
            for each in found:
                blocks = held.setdefault(each.namespace, NamespaceBlocks(each.namespace))
                if each.key is None:
                    blocks.describe(await _facts_untrusted(self._client, each.name))
                else:
                    blocks.add(each.key, each.size, each.stored_s)
        return held

    @override
    async def _describe(self, advance: Callable[[int], None]) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        try:
            folders = await self._client.folders(self._address.prefix)
            advance(len(folders))
            for namespace in filter(_NAMESPACE.fullmatch, folders):
                name = self._address.below(f"{namespace}/{DESCRIPTION}")
                found[namespace] = await _facts_untrusted(self._client, name)
                advance(1)
        except RequestFailed as refused:
            if refused.failure is not Failure.DENIED:
                raise
            raise ConfigError(f"{refused} (give the user s3:ListBucket)") from None
        return found

    @override
    async def _remove(
        self, selection: Selection, advance: Callable[[int], None], *, dry: bool
    ) -> tuple[dict[str, NamespaceBlocks], int]:
        gone: dict[str, NamespaceBlocks] = {}
        failed = 0
        async for found in _walk(self._client, self._address, advance):
            going = [each for each in found if _is_going(selection, each)]
            try:
                if going and not dry:
                    await self._client.remove([each.name for each in going])
            except RequestFailed as refused:
                if refused.failure not in _SERVER_SAYS_NO:
                    raise
                failed += len(going)
                continue
            for each in going:
                if each.key is not None:
                    blocks = gone.setdefault(each.namespace, NamespaceBlocks(each.namespace))
                    blocks.add(each.key, each.size, each.stored_s)
        return gone, failed


def _is_going(selection: Selection, found: _Found) -> bool:
    if found.key is None:
        return selection.are_whole_namespaces and selection.namespace in (None, found.namespace)
    return selection.has(found.namespace, found.key, found.stored_s)


async def _walk(
    client: S3Client, address: Address, advance: Callable[[int], None]
) -> AsyncIterator[Sequence[_Found]]:
    """Yield our objects, in batches. Names come in order: how far a key is tells how far we are."""
    below = address.below("")
    namespaces, done = set[str](), 0
    async for page in client.walk(address.prefix):
        known = ((each, _parts(each.name.removeprefix(below))) for each in page)
        found = [
            _Found(each.name, *parts, each.size, each.stored_s)
            for each, parts in known
            if parts is not None
        ]
        namespaces.update(each.namespace for each in found)
        last = next((each.key for each in reversed(found) if each.key is not None), b"")
        come = PARTS * (len(namespaces) - 1) + (int.from_bytes(last[:2].ljust(2, b"\0")) >> 4)
        advance(max(0, come - done))
        done = max(come, done)
        yield found


def _parts(name: str) -> tuple[str, bytes | None] | None:
    """Return an object's namespace, and a block's key; None if no tier has created it."""
    namespace, *rest = name.split("/")
    if not _NAMESPACE.fullmatch(namespace):
        return None
    if rest == [DESCRIPTION]:
        return namespace, None
    is_block = len(rest) == 2 and _KEY.fullmatch(rest[1]) and rest[1].startswith(rest[0])
    return (namespace, bytes.fromhex(rest[1])) if is_block and rest[0] else None


async def _facts_untrusted(client: S3Client, name: str) -> dict[str, Any]:
    try:
        raw = await client.get_up_to(name, DESCRIPTION_BYTES_MAX)
        return facts_of(parse_description_untrusted(raw))
    except (WrongLength, DescriptionDamaged):
        return {}
    except RequestFailed as failed:
        if failed.failure is Failure.ABSENT:  # an engine or another purge removed it meanwhile
            return {}
        raise
