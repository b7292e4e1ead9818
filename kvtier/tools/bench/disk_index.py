"""Prints what the disk tier's index costs at a million blocks: bytes, pauses, time to fill.

The promises: at most 120 bytes a block, keys included, no call over 5 ms while
it grows, and a bulk load from table pages in well under 2 s. They stand here
and not in a test for the reason given in ``import_time.py``.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from pathlib import Path

from kvtier_backends.disk.format import (
    TAG_BYTES,
    Entry,
    TableWriter,
    decode_table_untrusted,
    records_max,
)
from kvtier_backends.disk.log.index import BlockIndex, BlockRecord
from kvtier_backends.disk.log.index_bulk import BulkLoad

BLOCKS = 1_000_000
KEY_BYTES = 36  # a SHA-256 and a group index
SLOTS_PER_REGION = 1022  # 64 MiB regions of 64 KiB blocks
REGIONS = int(BLOCKS * 1.12 / SLOTS_PER_REGION)  # with the overprovisioned slots
BYTES_MAX = 120
PAUSE_MS_MAX = 5.0
INCARNATION = bytes(16)


def resident_bytes() -> int:
    """Return how much memory this process has in use."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def key_of(number: int) -> bytes:
    """Return a key of the usual length, well spread."""
    return (number * 0x9E3779B97F4A7C15 % 2**64).to_bytes(8, "big") * 4 + bytes(4)


def grow(*, encrypted: bool) -> tuple[BlockIndex, float, float]:
    """Insert the blocks one by one; returns the longest call in ms, and µs per block.

    In processor time, so that what else runs on the machine is no pause of ours.
    """
    index = BlockIndex(REGIONS, SLOTS_PER_REGION, encrypted=encrypted)
    record = BlockRecord(bytes(16), 1, 1, bytes(TAG_BYTES) if encrypted else b"")
    longest_s = 0.0
    total_s = 0.0
    for number in range(BLOCKS):
        key = key_of(number)
        start = time.thread_time()
        index.insert(key, number, record)
        taken_s = time.thread_time() - start
        total_s += taken_s
        longest_s = max(longest_s, taken_s)
    return index, longest_s * 1e3, total_s / BLOCKS * 1e6


def pages() -> list[tuple[int, bytes]]:
    """Return the table pages of a million blocks, with their regions."""
    made = []
    for first in range(0, BLOCKS, SLOTS_PER_REGION):
        for start in range(0, SLOTS_PER_REGION, records_max(KEY_BYTES, 0)):
            stop = min(start + records_max(KEY_BYTES, 0), SLOTS_PER_REGION, BLOCKS - first)
            writer = TableWriter(INCARNATION, 0)
            writer.add(
                [
                    Entry(slot, 1, key_of(first + slot), bytes(16), b"")
                    for slot in range(start, stop)
                ]
            )
            made.append((first // SLOTS_PER_REGION, writer.encode()))
    return made


def bulk(made: list[tuple[int, bytes]]) -> float:
    """Load all pages into an empty index; returns the seconds it took."""
    start = time.perf_counter()
    index = BlockIndex(REGIONS, SLOTS_PER_REGION)
    load = BulkLoad(index, 1, 0)
    region = -1
    for number, page in made:
        if number != region and region >= 0:
            load.end_region(region, region)
        region = number
        load.add_page(decode_table_untrusted(page, INCARNATION))
    load.end_region(region, region)
    load.finish(BLOCKS)
    assert len(index) == BLOCKS
    return time.perf_counter() - start


def measure(*, encrypted: bool) -> bool:
    """Measure and print one kind of index; tells whether the promises are kept."""
    gc.collect()
    before = resident_bytes()
    index, longest_ms, insert_us = grow(encrypted=encrypted)
    bytes_per_block = (resident_bytes() - before) / BLOCKS
    keys = [key_of(number) for number in range(0, BLOCKS, 10)]
    start = time.perf_counter()
    hits = sum(index.get(key) is not None for key in keys)
    get_us = (time.perf_counter() - start) / len(keys) * 1e6
    start = time.perf_counter()
    removed = sum(index.remove(key) is not None for key in keys)
    remove_us = (time.perf_counter() - start) / len(keys) * 1e6
    assert hits == removed == len(keys)
    print(
        f"disk index{' with encryption' if encrypted else ''}, {BLOCKS} blocks with keys of "
        f"{KEY_BYTES} bytes: {bytes_per_block:.0f} bytes a block (at most {BYTES_MAX}), longest "
        f"insert {longest_ms:.2f} ms (at most {PAUSE_MS_MAX}); "
        f"insert {insert_us:.2f} µs, get {get_us:.2f} µs, remove {remove_us:.2f} µs"
    )
    return bytes_per_block <= BYTES_MAX and longest_ms <= PAUSE_MS_MAX


def main() -> None:
    """Measure and print; exits with 1 if a promise is broken."""
    if len(sys.argv) > 1:
        sys.exit(not measure(encrypted=sys.argv[1] == "encrypted"))
    # Each in a process of its own: memory that one has freed would hide what the other takes.
    runs = [
        subprocess.run([sys.executable, __file__, kind], check=False)
        for kind in ("plain", "encrypted")
    ]
    print(f"bulk load from table pages: {bulk(pages()):.2f} s")
    sys.exit(any(run.returncode for run in runs))


if __name__ == "__main__":
    main()
