"""Measures what the host memory of an engine on the CPU costs at its start: once, as JSON.

``stress.bench.region JOB`` makes the region as a worker does, which takes its pages
from the kernel, and maps it as the scheduler does afterwards. On a CUDA device the memory is
vLLM's own, and so is what it costs.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Final

from kvtier.vllm.region import HostRegion

ROW_BYTES: Final = 1 << 20


def one_region(size: int) -> dict[str, float]:
    """Make and map ``size`` bytes; returns seconds by name."""
    seconds = {}
    name, rows = f"bench-start-{os.getpid()}", size // ROW_BYTES
    regions = []
    try:
        for what, rank in (("its worker makes it", 0), ("the scheduler maps it", None)):
            began_s = time.perf_counter()
            regions.append(
                HostRegion(name, slot_count=rows, row_bytes=ROW_BYTES, world_size=1, rank=rank)
            )
            seconds[what] = time.perf_counter() - began_s
    finally:
        for each in regions:
            each.close()
    return seconds


if __name__ == "__main__":
    print(json.dumps(one_region(json.loads(sys.argv[1])["region_bytes"])))
