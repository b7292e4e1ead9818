"""Compares where the ``fs`` tier may run: in a thread of the engine's process, or in its own.

Both move the same blocks to and from folders on the same disk, in turns within one run: whole
legs of stores and loads, a lone block, and the blocks of a short prompt. The thread that asks
either sleeps between two looks, or runs Python all the while, as vLLM's scheduler does.

Machines are shared and noisy: compare the two, and quote no figure by itself.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections import defaultdict, deque
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvtier.core import messages as m
from kvtier.hosts.choose import make_host
from kvtier.plugin_api.backend import BackendContext, Namespace, Outcome
from kvtier.plugin_api.slot_memory import SlotMemory
from kvtier.settings.runtime_config import TierConfig

if TYPE_CHECKING:
    from kvtier.core.messages import Message

CELLS: Final = ("thread", "process")
SIZES_KIB: Final = (64, 256, 1024, 2048)
JOB_BLOCKS: Final = 64  #: what one job of an engine has at most
PROMPT_BLOCKS: Final = 16
LONE_LOADS: Final = 30  #: a round
LOOK_S: Final = 50e-6
SPIN: Final = 2_000  #: steps of a busy thread between two looks, some 50 us
WAIT_S: Final = 120.0


class Side:
    """An ``fs`` tier in one kind of cell, over slots and a folder of its own."""

    def __init__(self, cell: str, folder: Path, block_bytes: int, slots: int) -> None:
        self._memory = SlotMemory.anonymous(slots, block_bytes)
        for slot in range(slots):
            self._memory.view(slot)[:] = os.urandom(block_bytes)
        self._arrived: deque[Message] = deque()
        self._folder = folder
        self._slots = slots
        self._job = 0
        self.is_busy = False
        tier = TierConfig.from_mapping(1, {"type": "fs", "cell": cell, "root_dir": str(folder)})
        context = BackendContext(block_bytes, Namespace({"benchmark": True}), "1:fs")
        self._host = make_host(tier, context, self._memory, self, messages_max=4096)
        self._host.start()

    def post(self, message: Message) -> bool:
        """Stand where the link's inbox is."""
        self._arrived.append(message)
        return True

    def close(self) -> None:
        """End the cell."""
        self._host.close(WAIT_S)

    def forget(self) -> None:
        """Remove all blocks."""
        for path in self._folder.rglob("*.kv"):
            path.unlink()

    def leg(self, leg: int, *, loads: bool) -> float:
        """Store or load each slot's block once; returns the seconds."""
        return self._move(
            [
                (range(start, min(start + JOB_BLOCKS, self._slots)), leg)
                for start in range(0, self._slots, JOB_BLOCKS)
            ],
            loads=loads,
        )

    def few(self, leg: int, first: int, count: int) -> float:
        """Load some blocks in one job; returns the seconds."""
        return self._move([(range(first, first + count), leg)], loads=True)

    def _move(self, parts: list[tuple[range, int]], *, loads: bool) -> float:
        began_s = time.perf_counter()
        for slots, leg in parts:
            self._job += 1
            keys = tuple(_key(leg, slot) for slot in slots)
            order: Message
            if loads:
                order = m.LoadJob(job=self._job, keys=keys, slots=tuple(slots))
            else:
                order = m.StoreJob(job=self._job, request="r", keys=keys, slots=tuple(slots))
            assert self._host.post(order)
        self._host.wake()
        left = len(parts)
        while left:
            self._host.poll()
            while self._arrived:
                message = self._arrived.popleft()
                assert isinstance(message, m.JobEnded), message
                assert set(message.outcomes) == {Outcome.DONE}, message.outcomes
                left -= 1
            self._host.wake()
            self._pass_time()
            assert time.perf_counter() - began_s < WAIT_S
        return time.perf_counter() - began_s

    def _pass_time(self) -> None:
        if not self.is_busy:
            time.sleep(LOOK_S)
            return
        total = 0
        for number in range(SPIN):
            total += number


def _key(leg: int, slot: int) -> bytes:
    return leg.to_bytes(16, "little") + slot.to_bytes(16, "little") + bytes(4)


def compare(folder: Path, kib: int, rounds: int, leg_bytes: int) -> None:
    """Print one table: medians of all rounds, and the ratio of the two."""
    block_bytes = kib << 10
    slots = max(PROMPT_BLOCKS, leg_bytes // block_bytes)
    sides = {cell: Side(cell, folder / cell, block_bytes, slots) for cell in CELLS}
    seen: dict[tuple[str, str], list[float]] = defaultdict(list)
    try:
        for turn in range(2 * rounds):
            is_busy = turn % 2 == 1
            who = "busy" if is_busy else "idle"
            order = CELLS if turn % 4 < 2 else CELLS[::-1]
            for cell in order:
                side = sides[cell]
                side.is_busy = is_busy
                gigabytes = slots * block_bytes / 1e9
                seen[f"store GB/s, {who}", cell].append(gigabytes / side.leg(turn, loads=False))
                seen[f"load GB/s, {who}", cell].append(gigabytes / side.leg(turn, loads=True))
                for number in range(LONE_LOADS):
                    lone_s = side.few(turn, number % slots, 1)
                    seen[f"lone load ms, {who}", cell].append(1e3 * lone_s)
                prompt_s = side.few(turn, 0, PROMPT_BLOCKS)
                seen[f"{PROMPT_BLOCKS} blocks ms, {who}", cell].append(1e3 * prompt_s)
                side.forget()
    finally:
        for side in sides.values():
            side.close()
    print(f"\n{kib} KiB, {slots} blocks a leg\n{'':24}{'thread':>9}{'process':>9}{'ratio':>8}")
    for what in dict.fromkeys(what for what, _ in seen):
        thread, process = (statistics.median(seen[what, cell]) for cell in CELLS)
        print(f"{what:24}{thread:9.3f}{process:9.3f}{process / thread:8.2f}", flush=True)


def main() -> None:
    """Compare the cells at each block size."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--folder", type=Path, help="on the disk to be measured")
    parser.add_argument("--rounds", type=int, default=7, help="each idle and busy")
    parser.add_argument("--mib", type=int, default=128, help="moved by a leg")
    parser.add_argument("--kib", type=int, nargs="*", default=SIZES_KIB, help="block sizes")
    given = parser.parse_args()
    for kib in given.kib:
        folder = Path(tempfile.mkdtemp(prefix="fs-cells-", dir=given.folder))
        try:
            compare(folder, kib, given.rounds, given.mib << 20)
        finally:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
