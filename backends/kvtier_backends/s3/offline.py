"""Lists the contents of an ``s3`` tier's bucket by namespace, and purges them, while in use.

A listing names up to a thousand objects a request, with their sizes and when they were stored, and
``DeleteObjects`` removes as many: no block is read.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kvtier_backends.s3.error_codes import Failure
from kvtier_backends.s3.failures import RequestFailed, WrongLength
from kvtier_backends.shared.holdings import Holding, Wanted
from kvtier_backends.shared.namespaces import (
    DESCRIPTION_BYTES_MAX,
    DescriptionDamaged,
    facts_of,
    parse_description_untrusted,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from kvtier_backends.s3.client import S3Client
    from kvtier_backends.s3.s3_options import Address

RETRIES_MAX: Final = 8
"""No engine waits, and a bucket of a million blocks takes a thousand requests: the library
repeats failed ones."""

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


async def list_bucket(
    client: S3Client, address: Address, advance: Callable[[int], None]
) -> dict[str, Holding]:
    """Return the contents by namespace. ``advance`` is called with each number of new names.

    Raises ``StoreFault``.
    """
    held: dict[str, Holding] = {}
    async for found in _walk(client, address):
        for each in found:
            holding = held.setdefault(each.namespace, Holding(each.namespace))
            if each.key is None:
                holding.describe(await _facts_untrusted(client, each.name))
            else:
                holding.add(each.key, each.size, each.stored_s)
        advance(len(found))
    return held


async def purge_bucket(
    client: S3Client,
    address: Address,
    wanted: Wanted,
    advance: Callable[[int], None],
    *,
    dry: bool,
) -> tuple[dict[str, Holding], int]:
    """Remove blocks. Returns the removed ones, and how many objects could not be removed.

    Descriptions go with whole namespaces; a running engine writes its own again. ``dry``:
    removes nothing. Raises ``StoreFault``.
    """
    gone: dict[str, Holding] = {}
    failed = 0
    async for found in _walk(client, address):
        going = [each for each in found if _is_going(wanted, each)]
        try:
            if going and not dry:
                await client.remove([each.name for each in going])
        except RequestFailed as refused:
            if refused.failure not in _SERVER_SAYS_NO:
                raise
            failed += len(going)
            continue
        for each in going:
            if each.key is not None:
                holding = gone.setdefault(each.namespace, Holding(each.namespace))
                holding.add(each.key, each.size, each.stored_s)
        advance(len(going))
    return gone, failed


def _is_going(wanted: Wanted, found: _Found) -> bool:
    if found.key is None:
        return wanted.are_whole_namespaces and wanted.namespace in (None, found.namespace)
    return wanted.has(found.namespace, found.key, found.stored_s)


async def _walk(client: S3Client, address: Address) -> AsyncIterator[Sequence[_Found]]:
    """Yield our objects, in batches."""
    below = address.below("")
    async for page in client.walk(address.prefix):
        known = ((each, _parts(each.name.removeprefix(below))) for each in page)
        yield [
            _Found(each.name, *parts, each.size, each.stored_s)
            for each, parts in known
            if parts is not None
        ]


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
