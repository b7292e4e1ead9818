"""Which plain client a type of tier is measured beside. Importing this needs no client library."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvtier.errors import Misuse
from kvtier.tools.bench.plain_fs import PlainFiles
from kvtier.tools.bench.plain_mooncake import PlainMooncake
from kvtier.tools.bench.plain_redis import PlainRedis
from kvtier.tools.bench.plain_s3 import PlainS3

if TYPE_CHECKING:
    from kvtier.tools.bench.plain_clients import PlainClient

PLAIN_CLIENTS: Final[dict[str, type[PlainClient]]] = {
    "fs": PlainFiles,
    "redis": PlainRedis,
    "s3": PlainS3,
    "mooncake": PlainMooncake,
}


def plain_client_class(kind: str) -> type[PlainClient]:
    """Return the class for a type of tier. Raises ``Misuse`` if it can't be measured."""
    if kind not in PLAIN_CLIENTS:
        also = " In kvtier's clone: python -m stress.bench disk." if kind == "disk" else ""
        raise Misuse(
            f"--tier: type {kind!r} has no client library to be measured beside. Choose one of "
            f"{', '.join(PLAIN_CLIENTS)}.{also}"
        )
    return PLAIN_CLIENTS[kind]
