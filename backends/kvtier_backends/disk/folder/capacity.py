"""Refuses tier capacities that can't work, and names the option to change.

Capacities that may work but were hardly intended, beyond the disk or with an index
that takes much of the memory, are reported when the tier opens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvtier.plugin_api.slot_memory import free_memory_bytes, machine_memory_bytes
from kvtier_backends.disk.folder.claim import (
    FOLDER_BYTES,
    REGIONS_MIN,
    capacity_bytes_min,
    plan_folder,
)
from kvtier_backends.disk.format import PAGE_BYTES, region_bytes_for
from kvtier_backends.disk.log.index import SLOTS_MAX
from kvtier_backends.posix import filesystem_bytes, nearest

if TYPE_CHECKING:
    from kvtier.plugin_api.backend import BackendContext
    from kvtier.plugin_api.options import Options
    from kvtier_backends.disk.disk_options import DiskOptions
    from kvtier_backends.disk.folder.claim import Plan

INDEX_BYTES_PER_BLOCK: Final = 90
"""Index memory for a stored block with a key of 36 bytes; its tag comes on top."""

INDEX_MEMORY_FRACTION: Final = 0.25
"""Fraction of the free memory: an index that may take more is reported."""


def check_region_bytes(
    reader: Options,
    region_bytes: int,
    capacity_bytes: int,
    context: BackendContext,
    tag_bytes: int,
) -> None:
    """Raise ``ConfigError`` for regions that hold no block, or are too large for the capacity."""
    if region_bytes % PAGE_BYTES:
        raise reader.error("region_bytes", region_bytes, f"must be a multiple of {PAGE_BYTES}")
    least = region_bytes_for(1, context.block_bytes, tag_bytes)
    if region_bytes < least:
        what = f"has no room for one block of {context.block_bytes} bytes"
        raise reader.error("region_bytes", region_bytes, f"{what}; give it {least}, or remove it")
    most = (capacity_bytes - FOLDER_BYTES) // REGIONS_MIN // PAGE_BYTES * PAGE_BYTES
    if least <= most < region_bytes:
        what = f"leaves no room for {REGIONS_MIN} regions in capacity_bytes={capacity_bytes}"
        raise reader.error("region_bytes", region_bytes, f"{what}; lower it to {most} or less")


def check_new_folder(reader: Options, given: DiskOptions, context: BackendContext) -> None:
    """Check how a new folder would be laid out. Raises ``ConfigError`` and ``OSError``."""
    capacity_bytes, tag_bytes = given.capacity_bytes, given.tag_bytes
    if given.region_bytes is not None:
        check_region_bytes(reader, given.region_bytes, capacity_bytes, context, tag_bytes)
    plan = plan_folder(capacity_bytes, context.block_bytes, tag_bytes, given.region_bytes)
    check_plan(reader, capacity_bytes, context, tag_bytes, plan)
    check_memory(reader, capacity_bytes, nearest(given.path)[0], plan, tag_bytes)


def check_plan(
    reader: Options, capacity_bytes: int, context: BackendContext, tag_bytes: int, plan: Plan
) -> None:
    """Raise ``ConfigError`` for a capacity with room for too few blocks, or for too many."""
    if plan.regions < REGIONS_MIN or plan.geometry.slots < 1:
        least = capacity_bytes_min(context.block_bytes, tag_bytes)
        raise reader.error(
            "capacity_bytes",
            capacity_bytes,
            f"has no room for {REGIONS_MIN} regions of blocks of {context.block_bytes} bytes; "
            f"give it {least} or more",
        )
    if plan.regions * plan.geometry.slots > SLOTS_MAX:
        raise reader.error(
            "capacity_bytes", capacity_bytes, f"is more than {SLOTS_MAX} blocks; lower it"
        )


def check_memory(
    reader: Options, capacity_bytes: int, path: str, plan: Plan, tag_bytes: int
) -> None:
    """Raise ``ConfigError`` if the index of a full disk exceeds the machine's memory.

    Raises ``OSError``.
    """
    memory_bytes = machine_memory_bytes()
    takes = index_bytes(path, plan, tag_bytes)
    if memory_bytes is not None and takes > memory_bytes:
        most = capacity_bytes * memory_bytes // takes
        raise reader.error(
            "capacity_bytes",
            capacity_bytes,
            f"wants an index of {takes} bytes, and there are {memory_bytes} bytes of "
            f"memory; lower it to {most} or less, or store larger blocks",
        )


def doubts(path: str, capacity_bytes: int, plan: Plan, tag_bytes: int) -> dict[str, str]:
    """Return warnings about a capacity, as texts by the name they are counted by.

    Raises ``OSError``.
    """
    found = {}
    disk_bytes = filesystem_bytes(path)
    if disk_bytes is not None and capacity_bytes > disk_bytes:
        found["capacity_beyond_the_disk"] = (
            f"capacity_bytes={capacity_bytes}, and the filesystem has {disk_bytes} bytes: the tier "
            "uses the space that it finds. Lower it to the space that others leave"
        )
    free, takes = free_memory_bytes(), index_bytes(path, plan, tag_bytes)
    if free is not None and takes > free * INDEX_MEMORY_FRACTION:
        found["index_beyond_memory"] = (
            f"the index takes {takes} bytes of memory once capacity_bytes={capacity_bytes} is "
            f"used up, and {free} bytes are free. Lower it, or store larger blocks"
        )
    return found


def index_bytes(path: str, plan: Plan, tag_bytes: int) -> int:
    """Return the memory of the index once the disk's whole room is used."""
    geometry, regions, disk_bytes = plan.geometry, plan.regions, filesystem_bytes(path)
    if disk_bytes is not None:
        regions = min(regions, disk_bytes // geometry.region_bytes + 1)
    return regions * geometry.slots * (INDEX_BYTES_PER_BLOCK + tag_bytes)
