"""The sides of ``stress.bench disk`` that are always there, and a leg on one of them.

vLLM's side is its tier manager. kvtier's is its whole tier cell, with queue, policy, digests and
backend, and a recorder where the engine cell has its end of the tier. ``raw`` is what the disk
gives with nothing around it.

A leg is all jobs of one kind, from a thread that is idle or busy in between. A job is what either
scheduler gives a tier: some blocks, with their keys and slots, to be stored or loaded together. The
thread is what the scheduler's is: it submits jobs and asks what has ended. Idle, it sleeps in
between, as it does while the GPU computes. Busy, it computes in Python: then the longest time
between two of its iterations is how long the tier's threads have kept it from its work.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
from typing_extensions import override
from vllm.v1.kv_offload.base import ReqContext
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager

from kvtier.core import wire
from kvtier.errors import InternalError, StoreFault
from kvtier.hosts.choose import make_host
from kvtier.hosts.process_host import TierProcess
from kvtier.plugin_api.backend import BackendContext, Namespace, Outcome
from kvtier.settings.extra_config import read_settings
from kvtier.tools.bench.call_legs import LOAD, STORE
from kvtier.tools.bench.plain_files import takes_direct
from kvtier.tools.held_signals import HeldSignals
from stress.bench.sides import KVTIER, VLLM, offloading_spec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from concurrent.futures import Future
    from pathlib import Path

    from kvtier.core.wire import Message
    from kvtier.plugin_api.slot_memory import SlotMemory

IDLE_POLL_S: Final = 0.0005
BUSY_ADDITIONS: Final = 2_000  #: in one iteration: about 50 us
LEG_TIMEOUT_S: Final = 600.0


class Job(NamedTuple):
    """Blocks that are stored or loaded together."""

    number: int  #: no other job of the same side has it
    keys: tuple[bytes, ...]
    slots: tuple[int, ...]


class DiskLeg(NamedTuple):
    """What one leg took. Times in seconds."""

    seconds: float
    job_seconds: list[float]  #: from submitting a job until its end was seen
    longest_pause_s: float  #: from one iteration of the thread to the next
    cpu_seconds: float | None  #: of all threads, those of the side's own processes too


@dataclass(frozen=True)
class DiskSetup:
    """What all sides share: the slots, and a folder in which each has its own."""

    folder: Path
    memory: SlotMemory
    threads: int

    @property
    def leg_bytes(self) -> int:
        """How much one leg moves: each slot once."""
        return self.memory.slot_count * self.memory.block_bytes

    @cached_property
    def takes_direct(self) -> bool:
        """Whether files in the folder can be opened with O_DIRECT."""
        return takes_direct(str(self.folder))


class DiskSide(ABC):
    """One tier. Everything is called from one thread, as a scheduler does."""

    def __init__(self, name: str, setup: DiskSetup) -> None:
        self.name = name
        self.folder = setup.folder / name.replace(", ", "-")
        self.is_direct = setup.takes_direct  #: whether it opens its files with O_DIRECT

    @abstractmethod
    def submit(self, kind: str, job: Job) -> None:
        """Begin to store a job's blocks from their slots, or to load them. Does not wait."""

    @abstractmethod
    def ended(self) -> Sequence[int]:
        """Return the jobs that have ended since the last call; all of their blocks are done.

        Raises ``StoreFault`` if any is not. Does not wait.
        """

    @abstractmethod
    def close(self) -> None:
        """End all threads."""

    def end_step(self) -> None:  # noqa: B027 - most sides need none
        """Do what is done once at the end of a scheduler's step."""

    def forget(self) -> None:  # noqa: B027 - most sides are bounded
        """Make room for the next blocks, if the side doesn't do it by itself."""

    def counters(self) -> Mapping[str, int]:
        """Return what the side itself has counted."""
        return {}

    def cpu_seconds(self) -> float:
        """Return the processor time that was taken so far, by all threads of all processes."""
        return time.process_time()


def play(side: DiskSide, kind: str, jobs: Sequence[Job], *, in_flight: int, busy: bool) -> DiskLeg:
    """Submit all jobs, and keep ``in_flight`` of them under way.

    Ctrl-C interrupts it between two calls of the side, which takes locks inside.
    """
    waiting = deque(jobs)
    started: dict[int, float] = {}
    job_seconds = []
    longest = 0.0
    cpu = side.cpu_seconds()
    begin = last = time.perf_counter()
    with HeldSignals() as signals:
        while waiting or started:
            signals.check()
            ended = side.ended()
            seen = time.perf_counter()
            job_seconds += [seen - started.pop(number) for number in ended]
            room = in_flight - len(started)
            # A busy scheduler submits what one step brings, not everything at once.
            for _ in range(min(room, len(waiting), 1 if busy else room)):
                job = waiting.popleft()
                started[job.number] = time.perf_counter()
                side.submit(kind, job)
            side.end_step()
            if busy:
                _compute()
            elif started:
                time.sleep(IDLE_POLL_S)
            now = time.perf_counter()
            longest, last = max(longest, now - last), now
            if now - begin > LEG_TIMEOUT_S:
                raise InternalError(f"{side.name}: a leg took over {LEG_TIMEOUT_S:.0f} s")
    return DiskLeg(last - begin, job_seconds, longest, side.cpu_seconds() - cpu)


def longest_pause_without_io_s(seconds: float) -> float:
    """Return the longest pause of the same busy thread when no tier does anything."""
    longest = 0.0
    begin = last = time.perf_counter()
    while last - begin < seconds:
        _compute()
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    return longest


def _compute() -> None:
    total = 0
    for number in range(BUSY_ADDITIONS):
        total += number


ENCRYPTED: Final = "kvtier, encrypted"
KVTIER_FS: Final = "kvtier fs"
RAW: Final = "raw"

CAPACITY_LEGS: Final = 2.5
"""kvtier's folder holds so many legs' bytes: from the third leg on it overwrites the oldest."""

REGION_BYTES: Final = 64 << 20
"""What ``disk`` chooses by itself from 4 GiB on; a smaller folder would be cut finer."""

REGIONS_MIN: Final = 16
"""A folder of fewer would say little of a tier that overwrites one region after the other."""

CALL_BYTES: Final = 8 << 20
"""Of one raw call: a job of large blocks in one would keep fewer threads busy than tiers have."""

OPEN_TIMEOUT_S: Final = 60.0
CLOSE_TIMEOUT_S: Final = 30.0
POLL_S: Final = 0.001


class VLLMSide(DiskSide):
    """vLLM's ``fs`` tier: a file a block, each job in one thread of its pool.

    Its reading and its writing threads help each other out, so all of them
    work on either kind of job.
    """

    def __init__(self, setup: DiskSetup) -> None:
        super().__init__(VLLM, setup)
        memory, readers = setup.memory, setup.threads // 2
        self._tier = FileSystemTierManager(
            offloading_spec(),
            memory.buffer.cast("B", (memory.slot_count, memory.block_bytes)),
            "fs",
            root_dir=str(self.folder),
            n_read_threads=readers,
            n_write_threads=setup.threads - readers,
        )
        self._context = ReqContext(req_id="bench")
        self.is_direct = bool(self._tier._use_o_direct)  # noqa: SLF001 - it says so nowhere else

    @override
    def submit(self, kind: str, job: Job) -> None:
        begin = self._tier.submit_store if kind == STORE else self._tier.submit_load
        transfer = TransferJob(
            job_id=job.number,
            keys=job.keys,
            chunk_ids=np.array(job.slots, dtype=np.int32),
            is_promotion=kind == LOAD,
            req_context=self._context,
        )
        begin(transfer)

    @override
    def ended(self) -> Sequence[int]:
        results = self._tier.get_finished_jobs()
        for result in results:
            if not result.success:
                raise StoreFault(f"vLLM's fs tier failed job {result.job_id}; its log says why")
        return [result.job_id for result in results]

    @override
    def forget(self) -> None:
        empty_files(self.folder)

    @override
    def close(self) -> None:
        self._tier.shutdown()


def disk_side(setup: DiskSetup, key_file: Path | None = None) -> TierSide:
    """Return kvtier's ``disk`` tier. ``key_file``: encrypts with the key in it."""
    options: dict[str, object] = {
        "type": "disk",
        "capacity_bytes": int(CAPACITY_LEGS * setup.leg_bytes),
        "io_depth": setup.threads,
        # What is loaded here was stored last; lru evicts what was stored first.
        "eviction_policy": "lru",
    }
    if CAPACITY_LEGS * setup.leg_bytes >= REGIONS_MIN * REGION_BYTES:
        options["region_bytes"] = REGION_BYTES
    if key_file is not None:
        options["encryption_key_file"] = str(key_file)
    return TierSide(ENCRYPTED if key_file else KVTIER, setup, options, "path")


def fs_side(setup: DiskSetup) -> TierSide:
    """Return kvtier's ``fs`` tier: a file a block, as vLLM's has, with a digest in each."""
    threads = dict.fromkeys(("n_read_threads", "n_write_threads"), setup.threads)
    return TierSide(KVTIER_FS, setup, {"type": "fs", **threads}, "root_dir")


class TierSide(DiskSide):
    """One of kvtier's tiers, in its cell."""

    def __init__(
        self, name: str, setup: DiskSetup, options: Mapping[str, object], folder_option: str
    ) -> None:
        """``options``: the tier's, as an entry of ``secondary_tiers`` has them."""
        super().__init__(name, setup)
        memory = setup.memory
        config = read_settings(
            {"secondary_tiers": [{**options, folder_option: str(self.folder)}]},
            slot_count=memory.slot_count,
            block_bytes=memory.block_bytes,
        )
        (tier,) = config.tiers
        context = BackendContext(memory.block_bytes, Namespace({}), tier.name)
        self._keys: dict[int, tuple[bytes, ...]] = {}  # of the jobs under way
        self._is_open = False
        self._waiting: deque[Message] = deque()  # what has come from the tier
        self._counted: Mapping[str, int] = {}  # by the backend, as last reported
        self._tier = make_host(
            tier, context, memory, self, messages_max=config.mailbox_messages_max
        )
        assert self._tier.traits is not None, "a tier that is made"
        self._is_bounded = self._tier.traits.capacity_blocks is not None
        self._tier.start()
        try:
            self._wait_until_open()
        except BaseException:
            self.close()
            raise

    def post(self, message: Message) -> bool:
        """Keep a message of the tier's: this stands where the engine cell has its end of it."""
        if isinstance(message, wire.Counted):
            self._counted = message.counters
        else:
            self._waiting.append(message)
        return True

    @override
    def submit(self, kind: str, job: Job) -> None:
        number, keys, slots = job
        if kind == STORE:
            self._post(wire.StoreJob(job=number, request=str(number), keys=keys, slots=slots))
        else:
            self._post(wire.LoadJob(job=number, keys=keys, slots=slots))
        self._keys[number] = keys

    @override
    def ended(self) -> Sequence[int]:
        numbers = []
        self._tier.poll()
        while self._waiting:
            message = self._waiting.popleft()
            if isinstance(message, wire.TierBroke):
                raise StoreFault(f"{self.name}: the tier broke: {message.reason}")
            if isinstance(message, wire.ProbeAnswer):
                self._is_open = True
            if isinstance(message, wire.JobEnded):
                _check_outcomes(message)
                numbers.append(message.job)
                # Each job is a request's, which is over with it: the policy is to know.
                self._post(
                    wire.RequestEnded(request=str(message.job), order=self._keys.pop(message.job))
                )
        return numbers

    @override
    def end_step(self) -> None:
        self._tier.wake()

    @override
    def forget(self) -> None:
        if not self._is_bounded:
            empty_files(self.folder)

    @override
    def counters(self) -> Mapping[str, int]:
        self._tier.poll()
        return self._counted

    @override
    def cpu_seconds(self) -> float:
        elsewhere = self._tier.cpu_seconds() if isinstance(self._tier, TierProcess) else 0.0
        return super().cpu_seconds() + elsewhere

    @override
    def close(self) -> None:
        if not self._tier.close(CLOSE_TIMEOUT_S):
            raise InternalError(f"{self.name}: a thread hangs in {self.folder}")

    def _post(self, message: Message) -> None:
        if not self._tier.post(message):
            raise StoreFault(f"{self.name}: the tier takes no more messages; its log says why")

    def _wait_until_open(self) -> None:
        """Wait until the tier answers: it does when its backend has been opened."""
        self._post(wire.Probe(probe=0, keys=()))
        self._tier.wake()
        deadline_s = time.monotonic() + OPEN_TIMEOUT_S
        while not self._is_open:
            self.ended()
            if time.monotonic() > deadline_s:
                raise InternalError(f"{self.name}: not open after {OPEN_TIMEOUT_S:.0f} s")
            time.sleep(POLL_S)


def _check_outcomes(message: wire.JobEnded) -> None:
    # Counted first: names for each block would be a pause of the busy thread's own.
    if message.outcomes.count(Outcome.DONE) < len(message.outcomes):
        others = {Outcome(outcome).name for outcome in message.outcomes} - {Outcome.DONE.name}
        raise StoreFault(
            f"the tier ended job {message.job} with {', '.join(sorted(others))} "
            "for some of its blocks; its log says why"
        )


class RawSide(DiskSide):
    """``pwritev`` and ``preadv`` on one preallocated file as long as a leg, in threads.

    No keys, no index, no digests, nothing is ever evicted. A job's blocks lie one behind the other.
    Rounds that are not measured write all of the file first, which converts its extents.
    """

    def __init__(self, setup: DiskSetup) -> None:
        super().__init__(RAW, setup)
        self._memory = setup.memory
        self._places: dict[bytes, int] = {}  # first key of a job → where its blocks begin
        self._calls: dict[int, list[Future[None]]] = {}  # by job
        self.folder.mkdir()
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | (os.O_DIRECT if self.is_direct else 0)
        self._descriptor = os.open(self.folder / "raw", flags, 0o600)
        os.posix_fallocate(self._descriptor, 0, setup.leg_bytes)
        self._threads = ThreadPoolExecutor(setup.threads, thread_name_prefix="raw")

    @override
    def submit(self, kind: str, job: Job) -> None:
        views, block_bytes = self._memory.views(job.slots), self._memory.block_bytes
        end = len(self._places) * len(views) * block_bytes
        place = self._places.setdefault(job.keys[0], end)
        call = os.pwritev if kind == STORE else os.preadv
        size = max(1, CALL_BYTES // block_bytes)
        self._calls[job.number] = [
            self._threads.submit(
                _move, call, self._descriptor, views[at : at + size], place + at * block_bytes
            )
            for at in range(0, len(views), size)
        ]

    @override
    def ended(self) -> Sequence[int]:
        ended = [job for job, calls in self._calls.items() if all(each.done() for each in calls)]
        for job in ended:
            for call in self._calls.pop(job):
                call.result()  # raises what it raised
        return ended

    @override
    def forget(self) -> None:
        self._places.clear()

    @override
    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)
        os.close(self._descriptor)


def _move(
    call: Callable[[int, list[memoryview], int], int],
    descriptor: int,
    views: list[memoryview],
    at: int,
) -> None:
    expected = sum(view.nbytes for view in views)
    count = call(descriptor, views, at)
    if count != expected:
        raise StoreFault(f"raw: moved {count} of {expected} bytes. Is the disk full?")


def empty_files(root: Path) -> None:
    """Give back the room of all files, and keep the files.

    For minutes after files were deleted, ext4 searches their inodes, one by one, for each file that
    is made: ten times the processor time. A tier that deletes nothing does not meet that.
    """
    for parent, _, names in os.walk(root):
        for name in names:
            path = os.path.join(parent, name)
            if os.stat(path).st_size:
                os.truncate(path, 0)
