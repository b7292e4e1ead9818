"""Sizes a tier's batches if a thread moves each of them, and each block has a digest."""

from __future__ import annotations

from typing import Final

BATCH_BYTES_MAX: Final = 8 << 20
"""Larger batches end so far apart that disk and digests have too little to do in between."""

BATCHES_PER_THREAD: Final = 3
"""For large blocks: while one batch is at the disk, others have their digests computed."""

LARGE_BLOCK_BYTES: Final = 256 << 10
"""Smaller blocks are better moved together: fewer batches, with more blocks in each."""


def batches_per_thread(block_bytes: int) -> int:
    """Return how many batches to keep in flight for each thread that reads, or writes."""
    return BATCHES_PER_THREAD if block_bytes >= LARGE_BLOCK_BYTES else 1


def blocks_within(size: int, block_bytes: int) -> int:
    """Return how many blocks fit into this many bytes, at least one."""
    return max(1, size // block_bytes)
