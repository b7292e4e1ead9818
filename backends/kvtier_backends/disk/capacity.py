"""Whether a tier of this capacity can be: refuses what can't, and names the option to change."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtier_backends.disk.folder import FOLDER_BYTES, REGIONS_MIN, capacity_bytes_min
from kvtier_backends.disk.format import PAGE_BYTES, region_bytes_for
from kvtier_backends.disk.index import SLOTS_MAX

if TYPE_CHECKING:
    from kvtier.backend import BackendContext
    from kvtier.options import Options
    from kvtier_backends.disk.folder import Plan


def check_region_bytes(
    reader: Options,
    region_bytes: int,
    capacity_bytes: int,
    context: BackendContext,
    seal_bytes: int,
) -> None:
    """Raise ``ConfigError`` for regions that hold no block, or are too large for the capacity."""
    if region_bytes % PAGE_BYTES:
        raise reader.error("region_bytes", region_bytes, f"must be a multiple of {PAGE_BYTES}")
    least = region_bytes_for(1, context.block_bytes, seal_bytes)
    if region_bytes < least:
        what = f"has no room for one block of {context.block_bytes} bytes"
        raise reader.error("region_bytes", region_bytes, f"{what}; give it {least}, or remove it")
    most = (capacity_bytes - FOLDER_BYTES) // REGIONS_MIN // PAGE_BYTES * PAGE_BYTES
    if least <= most < region_bytes:
        what = f"leaves no room for {REGIONS_MIN} regions in capacity_bytes={capacity_bytes}"
        raise reader.error("region_bytes", region_bytes, f"{what}; lower it to {most} or less")


def check_plan(
    reader: Options, capacity_bytes: int, context: BackendContext, seal_bytes: int, plan: Plan
) -> None:
    """Raise ``ConfigError`` for a capacity with room for too few blocks, or for too many."""
    if plan.regions < REGIONS_MIN or plan.geometry.slots < 1:
        least = capacity_bytes_min(context.block_bytes, seal_bytes)
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
