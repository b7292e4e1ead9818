"""Lists the contents of a ``redis`` tier's servers by namespace, and purges them, while in use.

``SCAN`` walks the names in batches, ``STRLEN`` returns a block's size without reading it, and
``UNLINK`` leaves the freeing to a thread of the server: none of them keeps it from serving.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from kvtier_backends.redis.client import ServerRefused
from kvtier_backends.redis.topology import discover
from kvtier_backends.shared.holdings import Holding, Wanted
from kvtier_backends.shared.namespaces import (
    DESCRIPTION_BYTES_MAX,
    DescriptionDamaged,
    facts_of,
    parse_description_untrusted,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from kvtier_backends.redis.client import Commands, RedisClient
    from kvtier_backends.redis.redis_options import RedisOptions

NAMES_AT_ONCE: Final = 512
DESCRIPTION: Final = b"description"
_HEX: Final = re.compile(rb"(?:[0-9a-f]{2})+")


async def list_servers(
    client: RedisClient, given: RedisOptions, advance: Callable[[int], None]
) -> dict[str, Holding]:
    """Return the contents by namespace. ``advance`` is called with each number of new names.

    Raises ``StoreFault``.
    """
    found: dict[str, Holding] = {}
    async for run, names in _walk(client, given):
        await _count(run, names, found)
        for namespace, name in _descriptions(names):
            holding = found.setdefault(namespace, Holding(namespace))
            holding.describe(await _facts_untrusted(run, name))
        advance(len(names))
    return found


async def purge_servers(
    client: RedisClient,
    given: RedisOptions,
    wanted: Wanted,
    advance: Callable[[int], None],
    *,
    dry: bool,
) -> tuple[dict[str, Holding], int]:
    """Remove blocks. Returns the removed ones, and how many could not be removed.

    Descriptions go with whole namespaces; a running engine writes its own again. ``dry``:
    removes nothing. Raises ``StoreFault``.
    """
    gone: dict[str, Holding] = {}
    failed = 0
    async for run, names in _walk(client, given):
        going = {name: parts for name, parts in names.items() if _is_going(wanted, *parts)}
        await _count(run, going, gone)
        answers = await run([("UNLINK", name) for name in going]) if going and not dry else []
        failed += sum(isinstance(answer, ServerRefused) for answer in answers)
        advance(len(going))
    return gone, failed


def _is_going(wanted: Wanted, namespace: str, rest: bytes) -> bool:
    if rest == DESCRIPTION:
        return wanted.are_whole_namespaces and wanted.namespace in (None, namespace)
    return wanted.has(namespace, _key(rest))


def _key(rest: bytes) -> bytes:
    return bytes.fromhex(rest.decode())


_Names = dict[bytes, tuple[str, bytes]]
"""Names, each with its namespace and the rest of the name."""


async def _walk(client: RedisClient, given: RedisOptions) -> AsyncIterator[tuple[Commands, _Names]]:
    """Yield our names, each once, and the function that runs commands on their server."""
    topology = await discover(client, given)
    stem = f"{given.key_prefix}:".encode()
    for address in sorted(topology.addresses):
        seen: set[int] = set()  # a server that grows its table may return a name twice
        async with client.commanding(address) as run:
            cursor = b"0"
            while True:
                scan = ("SCAN", cursor, "MATCH", stem + b"*", "COUNT", str(NAMES_AT_ONCE))
                (answer,) = await run([scan])
                if isinstance(answer, ServerRefused):
                    raise answer
                cursor, names = answer
                new = {name for name in names if hash(name) not in seen}
                seen.update(map(hash, new))
                yield run, {name: parts for name in new if (parts := _parts(name, stem))}
                if int(cursor) == 0:
                    break


def _parts(name: bytes, stem: bytes) -> tuple[str, bytes] | None:
    """Return a name's namespace and the rest; None if no tier with this prefix made it."""
    namespace, _, rest = name.removeprefix(stem).rpartition(b":")
    if not namespace or b":" in namespace or not (rest == DESCRIPTION or _HEX.fullmatch(rest)):
        return None
    return namespace.decode("utf-8", "backslashreplace"), rest


def _descriptions(names: _Names) -> Sequence[tuple[str, bytes]]:
    return [(namespace, name) for name, (namespace, rest) in names.items() if rest == DESCRIPTION]


async def _count(run: Commands, names: _Names, into: dict[str, Holding]) -> None:
    blocks = [(name, *parts) for name, parts in names.items() if parts[1] != DESCRIPTION]
    sizes = await run([("STRLEN", name) for name, *_ in blocks]) if blocks else []
    for (_, namespace, rest), size in zip(blocks, sizes, strict=True):
        holding = into.setdefault(namespace, Holding(namespace))
        holding.add(_key(rest), size if isinstance(size, int) else 0)


async def _facts_untrusted(run: Commands, name: bytes) -> dict[str, Any]:
    (size,) = await run([("STRLEN", name)])
    if not isinstance(size, int) or size > DESCRIPTION_BYTES_MAX:
        return {}
    (raw,) = await run([("GET", name)])
    try:
        return facts_of(parse_description_untrusted(raw)) if isinstance(raw, bytes) else {}
    except DescriptionDamaged:
        return {}
