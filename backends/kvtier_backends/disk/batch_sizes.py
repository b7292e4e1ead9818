"""Sizes the batches in which the tier above stores to and loads from ``disk``."""

from __future__ import annotations

from typing import Final

from kvtier.plugin_api.backend import BackendTraits
from kvtier_backends.shared.batches import BATCH_BYTES_MAX, batches_per_thread, blocks_within

BATCH_BYTES_MIN: Final = 1 << 20
"""A smaller transfer takes longer to hand over than to perform."""

BATCH_BYTES_WANTED: Final = 4 << 20
"""A transfer of this size keeps a disk busy while the next one is handed over."""

BATCH_BLOCKS_MAX: Final = 64
"""More blocks in one transfer save nothing, however small they are."""


def disk_traits(block_bytes: int, io_depth: int, capacity_blocks: int) -> BackendTraits:
    """Return the traits for the tier above. ``io_depth``: threads that read, and that write."""

    def batch_blocks(size: int) -> int:
        return min(BATCH_BLOCKS_MAX, blocks_within(size, block_bytes))

    batches_max = io_depth * batches_per_thread(block_bytes)
    return BackendTraits(
        load_batches_max=batches_max,
        store_batches_max=batches_max,
        load_batch_blocks_min=batch_blocks(BATCH_BYTES_MIN),
        load_batch_blocks_max=min(
            max(BackendTraits.load_batch_blocks_max, batch_blocks(BATCH_BYTES_WANTED)),
            batch_blocks(BATCH_BYTES_MAX),
        ),
        store_batch_blocks_min=batch_blocks(BATCH_BYTES_WANTED),
        store_batch_blocks_max=batch_blocks(BATCH_BYTES_MAX),
        capacity_blocks=capacity_blocks,
    )
