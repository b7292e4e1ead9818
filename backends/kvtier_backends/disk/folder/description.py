"""Describes a namespace in readable form, for a region's header.

The namespace's digest decides which blocks an engine serves. The description is for readers: from
it, ``kvtier ls`` shows the model of the blocks, and how two namespaces differ.
"""

from __future__ import annotations

import json
import shlex
import zlib
from typing import TYPE_CHECKING, Any, Final

from kvtier.plugin_api.log import log
from kvtier_backends.shared import namespaces

if TYPE_CHECKING:
    from kvtier.plugin_api.backend import BackendContext

COMPRESSION_LEVEL: Final = 9


def describe(context: BackendContext) -> bytes:
    """Return the facts, compressed. A header leaves out a description that is too long."""
    text = json.dumps(
        namespaces.as_json(context.namespace.facts), sort_keys=True, separators=(",", ":")
    )
    return zlib.compress(text.encode(), COMPRESSION_LEVEL)


def facts_untrusted(description: bytes) -> dict[str, Any]:
    """Return the facts; empty if there is no description, or it is damaged. Raises nothing."""
    try:
        text = zlib.decompressobj().decompress(description, namespaces.DESCRIPTION_BYTES_MAX)
        return namespaces.parse_description_untrusted(text)
    except (zlib.error, namespaces.DescriptionDamaged):
        return {}


def tell_of_others(tier_name: str, path: str, others_bytes: int) -> None:
    """Log how much of the folder other namespaces use, if any: an older kvtier's, or a model's."""
    if others_bytes:
        log.info(
            "disk tier: a part of the folder holds blocks of other namespaces, which this engine "
            "overwrites when it needs room. kvtier ls shows how they differ",
            tier=tier_name,
            path=path,
            bytes=f"{others_bytes:,}",
            remove=f"kvtier purge {shlex.quote(path)} --namespace ...",
        )
