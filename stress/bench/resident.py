"""What resident blocks weigh, and the longest pauses: one manager alone, in a process of its own.

Alone, because the garbage collector walks over the objects of both sides if
both are there.

Three measures, from two passes over the same requests: the first for the
growth of the process and for pauses, the second, slower one for the bytes
that Python and NumPy have allocated (``tracemalloc``), keys included.
"""

from __future__ import annotations

import gc
import random
import resource
import time
import tracemalloc
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from vllm.utils.gc_utils import freeze_gc_heap

from stress.bench.harness import SEED
from stress.bench.ops import BLOCK_BYTES, close_all
from stress.bench.sides import ManagerSide, Setup
from stress.bench.turns import PauseWatch, RequestPlayer, Stopwatch

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

LOADED_REQUESTS_MAX: Final = 100
_PAGE_BYTES: Final = resource.getpagesize()


def main(job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Measure one side."""
    count = job["request_blocks"]
    requests = max(1, job["blocks"] // count)
    setup = Setup(requests * count, BLOCK_BYTES, job["policy"])
    yield {
        "blocks": requests * count,
        **_pauses(job["side"], setup, requests, count),
        "traced_bytes_per_block": _traced_bytes(job["side"], setup, requests, count)
        / (requests * count),
    }


class Collections:
    """Times every run of the garbage collector."""

    def __init__(self) -> None:
        self.count = 0
        self.wall_ns = 0
        self.cpu_ns = 0
        self._started = (0, 0)

    def __call__(self, phase: str, _info: Mapping[str, int]) -> None:
        """Be told by ``gc`` that a collection begins or ends."""
        if phase == "start":
            self._started = (time.perf_counter_ns(), time.thread_time_ns())
            return
        wall, cpu = self._started
        self.count += 1
        self.wall_ns = max(self.wall_ns, time.perf_counter_ns() - wall)
        self.cpu_ns = max(self.cpu_ns, time.thread_time_ns() - cpu)


def _pauses(name: str, setup: Setup, requests: int, count: int) -> dict[str, Any]:
    before = _resident_bytes()
    side = ManagerSide(name, setup)
    freeze_gc_heap()  # as vLLM's engine core does when it has started
    watch, collections = PauseWatch(), Collections()
    gc.callbacks.append(collections)
    player = RequestPlayer(side, watch)
    for number in range(requests):
        player.store(number * count, count)
    slots_bytes = setup.slot_count * setup.block_bytes  # all touched, and no manager's cost
    grown = _resident_bytes() - before - slots_bytes
    few = min(requests, LOADED_REQUESTS_MAX)
    for request in random.Random(SEED).choices(range(requests), k=few):
        player.load(request * count, count)
    for number in range(requests, requests + few):
        player.store(number * count, count, evicting=True)
    gc.callbacks.remove(collections)
    close_all([side])
    return {
        "rss_bytes_per_block": grown / (requests * count),
        "gc_longest_ms": collections.cpu_ns / 1e6,
        "gc_longest_wall_ms": collections.wall_ns / 1e6,
        "gc_collections": collections.count,
        "call_longest_us": {call: ns / 1e3 for call, ns in watch.cpu_ns.items()},
        "call_longest_wall_us": {call: ns / 1e3 for call, ns in watch.wall_ns.items()},
    }


def _traced_bytes(name: str, setup: Setup, requests: int, count: int) -> int:
    tracemalloc.start()
    gc.collect()
    before, _ = tracemalloc.get_traced_memory()
    side = ManagerSide(name, setup)
    player = RequestPlayer(side, Stopwatch())
    for number in range(requests):
        player.fill(number * count, count)
    del player
    gc.collect()
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    close_all([side])
    return after - before


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES
