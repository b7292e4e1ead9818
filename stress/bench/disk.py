"""What a disk tier gives: all sides in one run, taking turns leg by leg.

A *leg* stores, or loads, each slot of the primary tier once, on one side. All
sides run the same leg one after the other, then all run the next; their order
is drawn by lot each time, for a disk gives less to who writes right after
another one has. Disks give more for a moment than they do for long, and other
users come and go, so ratios are taken within a round, and the median of these
is what is reported.

Every loaded byte is compared with what was stored, after the clock has stopped.
"""

from __future__ import annotations

import gc
import os
import random
import secrets
import shutil
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import xxhash
from vllm.utils.gc_utils import freeze_gc_heap

from kvtier.errors import StoreFault
from kvtier.plugin_api.slot_memory import SlotMemory
from kvtier.tools.held_signals import HeldSignals
from stress.bench.disk_fio import FIO, Fio, FioFailed
from stress.bench.disk_legs import DiskLeg, longest_pause_without_io_s, play
from stress.bench.disk_lmcache import LMCACHE, LMCacheSide
from stress.bench.disk_page_cache import drop, resident_bytes
from stress.bench.disk_raw import RAW, RawSide
from stress.bench.disk_sides import (
    ENCRYPTED,
    KVTIER_FS,
    DiskSetup,
    DiskSide,
    FsSide,
    Job,
    KVTierSide,
    VLLMSide,
    empty_files,
)
from stress.bench.sides import KVTIER, VLLM, make_keys

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

STORE: Final = "store"
LOAD: Final = "load"
KINDS: Final = (STORE, LOAD)
BUSY_SIDES: Final = (VLLM, KVTIER, ENCRYPTED)
"""A busy thread's pauses are compared between tiers; the disk by itself has none."""

WARM_UP_ROUNDS: Final = 3  #: kvtier's folder is full after them
WITHOUT_IO_S: Final = 1.0
JOBS_PER_THREAD: Final = 2  #: under way at once, so that no thread waits for the scheduler
_SEED: Final = 2026

Legs = dict[str, DiskLeg]  #: by side


@dataclass(frozen=True)
class DiskBenchOptions:
    """What is to be measured. ``leg_bytes`` is rounded down to whole jobs, one at least."""

    folder: Path  #: what the sides write goes into a new folder in it, and is emptied at the end
    leg_bytes: int
    rounds: int
    threads: int
    encrypted: bool = False
    beside_lmcache: bool = False
    warm: bool = False  #: leave in the page cache what is there when loads begin

    @property
    def sides(self) -> list[str]:
        """Everything that is measured, in the order of the table; fio only if it is found."""
        tiers = [VLLM, KVTIER_FS, KVTIER, *([ENCRYPTED] if self.encrypted else [])]
        tiers += [LMCACHE] if self.beside_lmcache else []
        return [*tiers, RAW, *([FIO] if shutil.which("fio") else [])]

    @property
    def legs(self) -> int:
        """How many legs one block size takes, the warm-up included."""
        idle, busy = len(self.sides), sum(name in BUSY_SIDES for name in self.sides)
        return len(KINDS) * (WARM_UP_ROUNDS * idle + self.rounds * (idle + busy))


class Round(NamedTuple):
    """The legs of one round: by kind, then by side."""

    idle: dict[str, Legs]
    busy: dict[str, Legs]
    pause_without_io_s: float


class DiskMeasured(NamedTuple):
    """All that one block size gave."""

    block_bytes: int
    leg_bytes: int
    job_blocks: int
    jobs_in_flight: int
    sides: list[str]
    rounds: list[Round]
    direct: dict[str, bool]  #: whether a side opens its files with O_DIRECT
    page_cache_bytes: dict[str, int]  #: of a side's files, as a load began: the most
    counters: dict[str, dict[str, int]]  #: what kvtier's own tiers counted
    fio: str  #: how it ran, or why it did not


def blocks_of_a_job(block_bytes: int) -> int:
    """Return how many blocks one job has."""
    return 32 if block_bytes < 1 << 20 else 16


def measure(
    options: DiskBenchOptions, block_bytes: int, on_leg: Callable[[], object]
) -> DiskMeasured:
    """Measure one block size. ``on_leg`` is called after each leg."""
    with _open_bed(options, block_bytes) as bed:
        for _ in range(WARM_UP_ROUNDS):
            bed.run_legs(busy=False, on_leg=on_leg)
        bed.page_cache_bytes = dict.fromkeys(bed.page_cache_bytes, 0)
        rounds = [
            Round(
                bed.run_legs(busy=False, on_leg=on_leg),
                bed.run_legs(busy=True, on_leg=on_leg),
                longest_pause_without_io_s(WITHOUT_IO_S),
            )
            for _ in range(options.rounds)
        ]
        sides = bed.sides
        return DiskMeasured(
            block_bytes=block_bytes,
            leg_bytes=bed.setup.leg_bytes,
            job_blocks=bed.job_blocks,
            jobs_in_flight=bed.in_flight,
            sides=bed.names,
            rounds=rounds,
            direct={name: side.is_direct for name, side in sides.items()},
            page_cache_bytes=bed.page_cache_bytes,
            counters={n: dict(s.counters()) for n, s in sides.items() if s.counters()},
            fio=bed.fio_note,
        )


@contextmanager
def _open_bed(options: DiskBenchOptions, block_bytes: int) -> Iterator[_Bed]:
    """Set all sides up on fresh slots; at the end nothing takes room any more, but files stay."""
    job_blocks = blocks_of_a_job(block_bytes)
    slots = max(1, options.leg_bytes // (job_blocks * block_bytes)) * job_blocks
    with ExitStack() as stack:
        memory = SlotMemory.anonymous(slots, block_bytes)
        folder = options.folder / f"{block_bytes}"
        folder.mkdir()
        stack.callback(empty_files, folder)
        setup = DiskSetup(
            folder,
            memory,
            memory.buffer.cast("B", (slots, block_bytes)),
            options.threads,
        )
        sides: list[DiskSide] = []
        stack.callback(_close, sides)
        with HeldSignals():  # so that a side that has been made is in the list
            sides += [VLLMSide(setup)]
            sides += [FsSide(setup)]
            sides += [KVTierSide(setup)]
            if options.encrypted:
                sides += [KVTierSide(setup, _make_key_file(folder))]
            if options.beside_lmcache:
                sides += [LMCacheSide(setup)]
            sides += [RawSide(setup)]
        bed = _Bed(options, setup, sides, job_blocks)
        freeze_gc_heap()  # as vLLM's engine core does when it has started
        stack.callback(gc.unfreeze)
        yield bed


def _close(sides: list[DiskSide]) -> None:
    """Close all, whatever one of them raises."""
    with ExitStack() as stack:
        for side in sides:
            stack.callback(side.close)
    sides.clear()


def _make_key_file(folder: Path) -> Path:
    path = folder / "keys"
    path.touch(mode=0o600)
    path.write_text(secrets.token_hex(32) + "\n")
    return path


class _Bed:
    """The slots, and all sides on them."""

    def __init__(
        self,
        options: DiskBenchOptions,
        setup: DiskSetup,
        sides: Sequence[DiskSide],
        job_blocks: int,
    ) -> None:
        self.setup = setup
        self.job_blocks = job_blocks
        self.in_flight = JOBS_PER_THREAD * options.threads
        self.sides = {side.name: side for side in sides}
        self.page_cache_bytes = dict.fromkeys(self.sides, 0)
        self._warm = options.warm
        self._lot = random.Random(_SEED)
        self._slots = list(range(setup.memory.slot_count))
        # Neighbours in a job are none in memory.
        self._lot.shuffle(self._slots)
        self._next_job = 1
        self._bytes = np.frombuffer(setup.view, dtype=np.uint64)
        self._bytes[:] = np.random.default_rng(_SEED).integers(
            1 << 64, size=len(self._bytes), dtype=np.uint64
        )
        self._digests = self._slot_digests()
        self._fio: Fio | None = None
        self.fio_note = self._open_fio(options)

    @property
    def names(self) -> list[str]:
        """All that take part, in the order of the table."""
        return [*self.sides, *([FIO] if self._fio else [])]

    def run_legs(self, *, busy: bool, on_leg: Callable[[], object]) -> dict[str, Legs]:
        """Have all sides store the same new blocks, then load them in the same order.

        So the blocks that kvtier evicts as least recently used are also those that lie
        together, and no block of theirs has to be written a second time.
        """
        jobs = self._new_jobs()
        names = [name for name in self.names if name in BUSY_SIDES or not busy]
        legs: dict[str, Legs] = {kind: {} for kind in KINDS}
        for kind in KINDS:
            for name in self._lot.sample(names, len(names)):
                os.sync()  # what the side before has left to be written is not this one's
                legs[kind][name] = self._run_leg(name, kind, jobs, busy=busy)
                on_leg()
        for side in self.sides.values():
            side.forget()
        return legs

    def _run_leg(self, name: str, kind: str, jobs: Sequence[Job], *, busy: bool) -> DiskLeg:
        if name == FIO:
            assert self._fio is not None
            return self._fio.run(is_write=kind == STORE)
        side = self.sides[name]
        if kind == STORE:
            return play(side, side.store, jobs, in_flight=self.in_flight, busy=busy)
        if not self._warm:
            drop(side.folder)
        resident = resident_bytes(side.folder)
        self.page_cache_bytes[name] = max(self.page_cache_bytes[name], resident)
        self._bytes[:] = 0
        leg = play(side, side.load, jobs, in_flight=self.in_flight, busy=busy)
        if self._slot_digests() != self._digests:
            raise StoreFault(f"{name}: a load brought other bytes than were stored")
        return leg

    def _new_jobs(self) -> list[Job]:
        """Return jobs over all slots, under keys that no leg has had before."""
        size, count = self.job_blocks, len(self._slots)
        keys = make_keys(self._next_job * size, count)
        jobs = [
            Job(
                self._next_job + start // size,
                tuple(keys[start : start + size]),
                tuple(self._slots[start : start + size]),
            )
            for start in range(0, count, size)
        ]
        self._next_job += len(jobs)
        return jobs

    def _slot_digests(self) -> list[int]:
        memory = self.setup.memory
        return [xxhash.xxh3_64_intdigest(memory.view(slot)) for slot in range(memory.slot_count)]

    def _open_fio(self, options: DiskBenchOptions) -> str:
        """Start with fio if it works here, and return what is to be reported of it."""
        setup = self.setup
        try:
            self._fio = Fio(
                setup.folder,
                leg_bytes=setup.leg_bytes,
                block_bytes=setup.memory.block_bytes,
                depth=options.threads,
                direct=self.sides[RAW].is_direct,
            )
        except FioFailed as problem:
            return str(problem)
        return f"{self._fio.version()}, {self._fio.engine}, depth {options.threads}"
