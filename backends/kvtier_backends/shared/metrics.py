"""Declares the counters that tiers on servers have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvtier.plugin_api.metrics import Counter

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvtier.plugin_api.metrics import BackendMetric

RECORDS: Final[Mapping[str, BackendMetric]] = {
    "unauthenticated": Counter("Blocks that no key of the tier authenticates."),
    "compression_bytes_in": Counter("Bytes of blocks before compression."),
    "compression_bytes_out": Counter("Bytes of the same blocks after compression."),
}
"""Counted by ``Records``."""

BLOCKS: Final[Mapping[str, BackendMetric]] = {
    **RECORDS,
    "blocks_damaged": Counter("Blocks that were not as they were stored."),
    "loads_failed": Counter("Blocks whose load failed at the storage or on the way there."),
    "stores_failed": Counter("Blocks whose store failed at the storage or on the way there."),
    "stores_full": Counter("Blocks that the storage had no room for."),
}

SERVERS: Final[Mapping[str, BackendMetric]] = {
    **BLOCKS,
    "connects_failed": Counter("Failed attempts to reach the server."),
    "connection_gone": Counter("Times that the server was lost."),
}
