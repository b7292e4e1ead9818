"""One load job uses all of ``io_depth`` at once, with neighbouring blocks in one read each."""

from __future__ import annotations

import os
import threading
from collections import deque
from typing import TYPE_CHECKING

from kvtier.core import wire
from kvtier.hosts.thread_host import TierThread
from kvtier.plugin_api.backend import Outcome
from kvtier.plugin_api.slot_memory import SlotMemory
from kvtier.settings.plugins import make_policy
from kvtier.settings.runtime_config import TierConfig
from tests.support.patience import PATIENCE_S
from tests.unit.backends.disk._disk import BLOCK_BYTES, data_of, key_of, make_disk

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

    from kvtier.core.wire import Message

IO_DEPTH = 4
BLOCKS = 32


class Link:
    """Takes what the tier reports."""

    def __init__(self) -> None:
        self.ended: deque[wire.JobEnded] = deque()
        self.rang = threading.Semaphore(0)

    def post(self, message: Message) -> bool:
        if isinstance(message, wire.JobEnded):
            self.ended.append(message)
            self.rang.release()
        return True

    def next_end(self) -> wire.JobEnded:
        assert self.rang.acquire(timeout=PATIENCE_S)
        return self.ended.popleft()


def test_a_job_spreads_over_io_depth_and_reads_neighbours_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Blocks of a test are small: as they are, one call would do for all of them.
    monkeypatch.setattr("kvtier_backends.disk.batch_sizes.BATCH_BYTES_MIN", BLOCK_BYTES)
    together = threading.Barrier(IO_DEPTH, timeout=PATIENCE_S)
    sizes: list[int] = []
    real = os.preadv

    def read_together(descriptor: int, buffers: list[memoryview], at: int) -> int:
        sizes.append(sum(buffer.nbytes for buffer in buffers))
        if len(sizes) <= IO_DEPTH:
            together.wait()  # breaks, and so fails the load, unless so many read at once
        return real(descriptor, buffers, at)

    memory = SlotMemory.anonymous(BLOCKS, BLOCK_BYTES)
    link = Link()
    backend = make_disk(
        tmp_path, io_depth=IO_DEPTH, capacity_bytes=8 << 20, region_bytes=64 * BLOCK_BYTES
    )
    cell = TierThread(
        TierConfig("1:disk", "disk"),
        memory,
        link,
        messages_max=64,
        make_backend=lambda: backend,
        policy_of=lambda traits: lambda: make_policy("lru", traits.capacity_blocks or 0),
    )
    cell.make()
    cell.start()
    try:
        keys = tuple(key_of(number) for number in range(BLOCKS))
        for number in range(BLOCKS):
            memory.view(number)[:] = data_of(number)
        cell.post(wire.StoreJob(job=1, request="r", keys=keys, slots=tuple(range(BLOCKS))))
        cell.wake()
        assert set(link.next_end().outcomes) == {Outcome.DONE}
        monkeypatch.setattr(os, "preadv", read_together)
        cell.post(wire.LoadJob(job=2, keys=keys, slots=tuple(range(BLOCKS))))
        cell.wake()
        assert set(link.next_end().outcomes) == {Outcome.DONE}
    finally:
        cell.close(PATIENCE_S)
    assert sum(sizes) == BLOCKS * BLOCK_BYTES
    assert sizes[0] == BLOCKS // IO_DEPTH * BLOCK_BYTES
    assert len(sizes) < BLOCKS // 2
