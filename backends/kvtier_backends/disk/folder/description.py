"""The description of a namespace in plain words, as a region's header holds it.

What an engine serves is decided by the namespace's digest. The description is for people: ``kvtier
ls`` shows by it whose blocks these are, and in what two namespaces differ.
"""

from __future__ import annotations

import json
import zlib
from typing import TYPE_CHECKING, Any, Final

from kvtier.plugin_api.log import log
from kvtier_backends.shared import namespaces

if TYPE_CHECKING:
    from kvtier.plugin_api.backend import BackendContext

COMPRESSION_LEVEL: Final = 9


def describe(context: BackendContext) -> bytes:
    """Return the facts, compressed. A header leaves out what is too long for it."""
    text = json.dumps(
        namespaces.as_json(context.namespace.facts), sort_keys=True, separators=(",", ":")
    )
    return zlib.compress(text.encode(), COMPRESSION_LEVEL)


def facts_untrusted(description: bytes) -> dict[str, Any]:
    """Return the facts; none if there is no description, or it is damaged. Raises nothing."""
    try:
        text = zlib.decompressobj().decompress(description, namespaces.DESCRIPTION_BYTES_MAX)
        return namespaces.parse_description_untrusted(text)
    except (zlib.error, namespaces.DescriptionDamaged):
        return {}


def tell_of_others(tier_name: str, path: str, others_bytes: int) -> None:
    """Log how much of the folder other namespaces have, if any: an older kvtier's, or a model's."""
    if others_bytes:
        log.info(
            "disk tier: a part of the folder holds blocks of other namespaces, which this engine "
            "overwrites when it needs room. kvtier ls shows in what they differ",
            tier=tier_name,
            path=path,
            bytes=f"{others_bytes:,}",
            remove=f"kvtier purge {path} --namespace ...",
        )
