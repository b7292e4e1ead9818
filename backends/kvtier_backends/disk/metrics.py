"""Declares the counters of the ``disk`` tier."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvtier.plugin_api.metrics import CAPACITY_BYTES, USED_BYTES, Counter, Gauge
from kvtier_backends.disk.folder.recovery import FOLDER_CASES, PAGE_CASES, REGION_CASES
from kvtier_backends.disk.log.index import Dropped

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvtier.plugin_api.metrics import BackendMetric

_RECOVERED: Final = (
    *(case.name for case in (*FOLDER_CASES, *REGION_CASES, *PAGE_CASES)),
    "table_truncated",
    *(f"entries_{why}" for why in Dropped._fields),
)

METRICS: Final[Mapping[str, BackendMetric]] = {
    "capacity_bytes": CAPACITY_BYTES,
    "used_bytes": USED_BYTES,
    "blocks": Gauge("Blocks that the tier holds."),
    "regions_free": Gauge("Regions that hold no block."),
    "regions_retired": Gauge("Regions out of use because the medium failed there."),
    "bytes_stored": Counter("Bytes of new blocks written."),
    "bytes_reinserted": Counter("Bytes of blocks moved out of reclaimed regions."),
    "bytes_of_tables": Counter("Bytes of headers and tables written."),
    "regions_reclaimed": Counter("Regions reclaimed for new blocks."),
    "blocks_dropped": Counter("Blocks evicted with the region that held them."),
    "blocks_expired": Counter("Blocks older than ttl_s."),
    "blocks_purged": Counter("Blocks removed by kvtier purge."),
    "blocks_recovered": Counter("Blocks found at the start."),
    "blocks_truncated": Counter("Blocks behind the end of their file."),
    "loads_failed": Counter("Blocks that the medium failed to read."),
    "stores_failed": Counter("Blocks that the medium failed to write."),
    "stores_full": Counter("Blocks not written because no region had room."),
    "no_room_for_a_region": Counter("Regions that the filesystem had no space for."),
    "no_room_for_a_block": Counter("Blocks that the filesystem had no space for."),
    "direct_refused": Counter("Times that the filesystem refused O_DIRECT."),
    "room_not_reserved": Counter("Times that the filesystem could not reserve space."),
    "regions_suspected": Counter("Regions with a failed read, which is tried again."),
    "blocks_lost_with_a_region": Counter("Blocks lost with a retired region."),
    "folder_not_seen": Counter("Times that looking at the folder failed."),
    "capacity_beyond_the_disk": Counter("Starts with a capacity beyond the filesystem's size."),
    "index_beyond_memory": Counter("Starts with an index close to the machine's memory."),
    "folder_vanished": Counter("Times that the folder was gone."),
    "folder_came_back": Counter("Times that it was there again."),
    "blocks_lost_with_the_folder": Counter("Blocks lost with the folder."),
    "superblock_restored": Counter("Times that the superblock was written again."),
    "upkeep_failed": Counter("Times that upkeep raised."),
    "segments_removed": Counter("Files removed because the folder was started afresh."),
    "segments_truncated": Counter("Files cut or removed for a smaller capacity."),
    **{
        name: Counter(
            "Folders, regions, tables and entries read at the start, by recovery case.",
            name="disk_recovery",
            labels=(("case", name),),
        )
        for name in _RECOVERED
    },
}
