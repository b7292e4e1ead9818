"""Lists the contents of a ``redis`` tier's servers by namespace, and purges them, while in use.

``SCAN`` walks the names in batches, ``STRLEN`` returns a block's size without reading it, and
``UNLINK`` leaves the freeing to a thread of the server: none of them keeps it from serving.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, ClassVar, Final

from typing_extensions import override

from kvtier.errors import ConfigError
from kvtier.plugin_api.backend import BackendContext, Namespace
from kvtier.plugin_api.offline import NamespaceBlocks
from kvtier_backends.redis.client import RedisClient, ServerRefused
from kvtier_backends.redis.redis_options import SCHEMES, read_options
from kvtier_backends.redis.server_errors import MAY_NOT
from kvtier_backends.redis.servers import discover
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
    from kvtier_backends.redis.client import Commands
    from kvtier_backends.redis.redis_options import RedisOptions

NAMES_AT_ONCE: Final = 512
NAMES_AT_ONCE_UNREAD: Final = 4096
"""Names scanned in one step if few of them match: a server takes about a millisecond."""

DESCRIPTION: Final = b"description"
_HEX: Final = re.compile(rb"(?:[0-9a-f]{2})+")


class RedisStorage(ServerStorage):
    """Redis and Valkey servers."""

    schemes: ClassVar[tuple[str, ...]] = SCHEMES

    def __init__(self, client: RedisClient, given: RedisOptions) -> None:
        self.place = given.place
        self._client = client
        self._given = given

    @classmethod
    @override
    def from_options(cls, options: Mapping[str, Any]) -> RedisStorage:
        reader, given = read_options(options, BackendContext(1, Namespace({}), "redis"))
        return cls(RedisClient(given, reader), given)

    @override
    def refuse_selection(self, selection: Selection) -> None:
        if selection.before_s is not None:
            raise ConfigError(
                "--older-than: these servers do not report the age of a block. Give the tier "
                "ttl_s, "
                "or remove a whole namespace."
            )

    @override
    async def _size(self) -> int | None:
        """Return the names that the servers have, also those of others."""
        size = 0
        topology = await discover(self._client, self._given)
        for address in sorted(topology.addresses):
            async with self._client.asking(address) as ask:
                try:
                    size += await ask("DBSIZE")
                except ServerRefused:
                    return None
        return size

    @override
    async def _list(self, advance: Callable[[int], None]) -> dict[str, NamespaceBlocks]:
        found: dict[str, NamespaceBlocks] = {}
        async for run, names in _walk(self._client, self._given, advance):
            await _count(run, names, found)
            for namespace, name in _descriptions(names):
                blocks = found.setdefault(namespace, NamespaceBlocks(namespace))
                blocks.describe(await _facts_untrusted(run, name))
        return found

    @override
    async def _describe(self, advance: Callable[[int], None]) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        try:
            async for run, names in _walk(
                self._client, self._given, advance, b":" + DESCRIPTION, NAMES_AT_ONCE_UNREAD
            ):
                for namespace, name in _descriptions(names):
                    found[namespace] = await _facts_untrusted(run, name)
        except ServerRefused as refused:
            if refused.kind != MAY_NOT:
                raise
            raise ConfigError(f"{refused} (give the ACL user +scan +strlen)") from None
        return found

    @override
    async def _remove(
        self, selection: Selection, advance: Callable[[int], None], *, dry: bool
    ) -> tuple[dict[str, NamespaceBlocks], int]:
        gone: dict[str, NamespaceBlocks] = {}
        failed = 0
        async for run, names in _walk(self._client, self._given, advance):
            going = {name: parts for name, parts in names.items() if _is_going(selection, *parts)}
            await _count(run, going, gone)
            answers = await run([("UNLINK", name) for name in going]) if going and not dry else []
            failed += sum(isinstance(answer, ServerRefused) for answer in answers)
        return gone, failed


def _is_going(selection: Selection, namespace: str, rest: bytes) -> bool:
    if rest == DESCRIPTION:
        return selection.are_whole_namespaces and selection.namespace in (None, namespace)
    return selection.has(namespace, _key(rest))


def _key(rest: bytes) -> bytes:
    return bytes.fromhex(rest.decode())


_Names = dict[bytes, tuple[str, bytes]]
"""Names, each with its namespace and the rest of the name."""


async def _walk(
    client: RedisClient,
    given: RedisOptions,
    advance: Callable[[int], None],
    ending: bytes = b"",
    names_at_once: int = 0,
) -> AsyncIterator[tuple[Commands, _Names]]:
    """Yield our names, each once, and the function that runs commands on their server.

    ``ending``: of the names to yield. ``names_at_once``: names that the server scans in a step; 0:
    ``NAMES_AT_ONCE``.
    """
    topology = await discover(client, given)
    stem = f"{given.key_prefix}:".encode()
    pattern, count = stem + b"*" + ending, str(names_at_once or NAMES_AT_ONCE)
    for address in sorted(topology.addresses):
        seen: set[int] = set()  # a server that grows its table may return a name twice
        async with client.commanding(address) as run:
            cursor = b"0"
            while True:
                scan = ("SCAN", cursor, "MATCH", pattern, "COUNT", count)
                (answer,) = await run([scan])
                if isinstance(answer, ServerRefused):
                    raise answer
                cursor, names = answer
                advance(int(count))
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


async def _count(run: Commands, names: _Names, into: dict[str, NamespaceBlocks]) -> None:
    blocks = [(name, *parts) for name, parts in names.items() if parts[1] != DESCRIPTION]
    sizes = await run([("STRLEN", name) for name, *_ in blocks]) if blocks else []
    for (_, namespace, rest), size in zip(blocks, sizes, strict=True):
        held = into.setdefault(namespace, NamespaceBlocks(namespace))
        held.add(_key(rest), size if isinstance(size, int) else 0)


async def _facts_untrusted(run: Commands, name: bytes) -> dict[str, Any]:
    (size,) = await run([("STRLEN", name)])
    if not isinstance(size, int) or size > DESCRIPTION_BYTES_MAX:
        return {}
    (raw,) = await run([("GET", name)])
    try:
        return facts_of(parse_description_untrusted(raw)) if isinstance(raw, bytes) else {}
    except DescriptionDamaged:
        return {}
