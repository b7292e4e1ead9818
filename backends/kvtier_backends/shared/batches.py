"""How a tier's calls are cut where a thread moves each of them, and each block has a digest."""

from __future__ import annotations

from typing import Final

BATCH_BYTES_MAX: Final = 8 << 20
"""Larger batches end so far apart that disk and digests have too little to do in between."""

BATCHES_PER_THREAD: Final = 3
"""Of large blocks: while one batch is at the disk, others have their digests computed."""

LARGE_BLOCK_BYTES: Final = 256 << 10
"""Smaller ones are better moved together: in fewer batches there are more of them in each."""


def batches_per_thread(block_bytes: int) -> int:
    """Return how many batches are to be under way for each thread that reads, or writes."""
    return BATCHES_PER_THREAD if block_bytes >= LARGE_BLOCK_BYTES else 1


def blocks_within(size: int, block_bytes: int) -> int:
    """Return how many blocks have so many bytes; one at least."""
    return max(1, size // block_bytes)
