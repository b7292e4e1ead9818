"""The tiers that ``stress.bench disk`` compares, each ready for jobs of the same kind.

A job is what either scheduler gives a tier: some blocks, with their keys and
slots, to be stored or loaded together. All sides work on the same slots, in
turns. vLLM's side is its tier manager; kvtier's is its whole tier cell, with
queue, policy, digests and backend, and a recorder where the engine cell has
its end of the tier.
"""

from __future__ import annotations

import errno
import os
import time
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from typing_extensions import override
from vllm.v1.kv_offload.base import ReqContext
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager

from kvtier.core import messages as m
from kvtier.errors import InternalError, Misuse, StoreFault
from kvtier.hosts.choose import make_host
from kvtier.hosts.process_host import TierProcess
from kvtier.plugin_api.backend import BackendContext, Namespace, Outcome
from kvtier.settings.extra_config import read_settings
from stress.bench.sides import KVTIER, VLLM, offloading_spec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from kvtier.core.messages import Message
    from kvtier.plugin_api.slot_memory import SlotMemory

ENCRYPTED: Final = "kvtier, encrypted"
KVTIER_FS: Final = "kvtier fs"

CAPACITY_LEGS: Final = 2.5
"""kvtier's folder holds so many legs' bytes: from the third leg on it overwrites the oldest."""

REGION_BYTES: Final = 64 << 20
"""What ``disk`` chooses by itself from 4 GiB on; a smaller folder would be cut finer."""

REGIONS_MIN: Final = 16
"""A folder of fewer would say little of a tier that overwrites one region after the other."""

OPEN_TIMEOUT_S: Final = 60.0
CLOSE_TIMEOUT_S: Final = 30.0
POLL_S: Final = 0.001


class Job(NamedTuple):
    """Blocks that are stored or loaded together."""

    number: int  #: no other job of the same side has it
    keys: tuple[bytes, ...]
    slots: tuple[int, ...]


@dataclass(frozen=True)
class DiskSetup:
    """What all sides share. ``folder`` gets a folder a side."""

    folder: Path
    memory: SlotMemory
    view: memoryview  #: the same slots, one row each
    threads: int

    @property
    def leg_bytes(self) -> int:
        """How much one leg moves: each slot once."""
        return self.memory.slot_count * self.memory.block_bytes


def side_folder(setup: DiskSetup, name: str) -> Path:
    """Return the folder of the side with this name."""
    return setup.folder / name.replace(", ", "-")


def fs_takes_direct(folder: Path) -> bool:
    """Tell whether files in this folder can be opened with O_DIRECT. Raises ``OSError``."""
    path = folder / "direct"
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600))
    except OSError as refused:
        if refused.errno != errno.EINVAL:
            raise
        return False
    finally:
        path.unlink(missing_ok=True)
    return True


class DiskSide(ABC):
    """One tier. Everything is called from one thread, as a scheduler does."""

    def __init__(self, name: str, setup: DiskSetup) -> None:
        self.name = name
        self.folder = side_folder(setup, name)

    @abstractmethod
    def store(self, job: Job) -> None:
        """Begin to store a job's blocks from their slots. Does not wait."""

    @abstractmethod
    def load(self, job: Job) -> None:
        """Begin to load a job's blocks into their slots. Does not wait."""

    @abstractmethod
    def ended(self) -> Sequence[int]:
        """Return the jobs that have ended since the last call; all of their blocks are done.

        Raises ``StoreFault`` if any is not. Does not wait.
        """

    def end_step(self) -> None:  # noqa: B027 - most sides need none
        """Do what is done once at the end of a scheduler's step."""

    def forget(self) -> None:  # noqa: B027 - most sides are bounded
        """Make room for the next blocks, if the side doesn't do it by itself."""

    @property
    @abstractmethod
    def is_direct(self) -> bool:
        """Whether it opens its files with O_DIRECT."""

    def counters(self) -> Mapping[str, int]:
        """Return what the side itself has counted."""
        return {}

    def cpu_seconds(self) -> float:
        """Return the processor time that was taken so far, by all threads of all processes."""
        return time.process_time()

    @abstractmethod
    def close(self) -> None:
        """End all threads."""


class VLLMSide(DiskSide):
    """vLLM's ``fs`` tier: a file a block, each job in one thread of its pool.

    Its reading and its writing threads help each other out, so all of them
    work on either kind of job.
    """

    def __init__(self, setup: DiskSetup) -> None:
        super().__init__(VLLM, setup)
        readers = setup.threads // 2
        self._tier = FileSystemTierManager(
            offloading_spec(),
            setup.view,
            "fs",
            root_dir=str(self.folder),
            n_read_threads=readers,
            n_write_threads=setup.threads - readers,
        )
        self._context = ReqContext(req_id="bench")

    @override
    def store(self, job: Job) -> None:
        self._tier.submit_store(self._transfer(job, is_load=False))

    @override
    def load(self, job: Job) -> None:
        self._tier.submit_load(self._transfer(job, is_load=True))

    def _transfer(self, job: Job, *, is_load: bool) -> Any:  # noqa: ANN401 - vLLM has no stubs
        return TransferJob(
            job_id=job.number,
            keys=job.keys,
            chunk_ids=np.array(job.slots, dtype=np.int32),
            is_promotion=is_load,
            req_context=self._context,
        )

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

    @property
    @override
    def is_direct(self) -> bool:
        return bool(self._tier._use_o_direct)  # noqa: SLF001 - it says so nowhere else

    @override
    def close(self) -> None:
        self._tier.shutdown()


class TierSide(DiskSide):
    """One of kvtier's tiers, in its cell."""

    def __init__(self, name: str, setup: DiskSetup, options: Mapping[str, object]) -> None:
        """``options``: the tier's, as an entry of ``secondary_tiers`` has them."""
        super().__init__(name, setup)
        memory = setup.memory
        config = read_settings(
            {"secondary_tiers": [dict(options)]},
            slot_count=memory.slot_count,
            block_bytes=memory.block_bytes,
        )
        (tier,) = config.tiers
        context = BackendContext(memory.block_bytes, Namespace({}), tier.name)
        self._keys: dict[int, tuple[bytes, ...]] = {}  # of the jobs under way
        self._is_open = False
        self._answers = _Recorder()
        self._tier = make_host(
            tier, context, memory, self._answers, messages_max=config.mailbox_messages_max
        )
        assert self._tier.traits is not None, "a tier that is made"
        capacity_blocks = self._tier.traits.capacity_blocks
        if capacity_blocks is not None and capacity_blocks < memory.slot_count:
            self._tier.close(CLOSE_TIMEOUT_S)
            raise Misuse(
                f"--bytes is too few for blocks of {memory.block_bytes} bytes: a folder of that "
                f"size has room for {capacity_blocks} of {memory.slot_count}. Give more."
            )
        self._tier.start()
        try:
            self._wait_until_open()
        except BaseException:
            self.close()
            raise

    @override
    def store(self, job: Job) -> None:
        self._post(
            m.StoreJob(job=job.number, request=str(job.number), keys=job.keys, slots=job.slots)
        )
        self._keys[job.number] = job.keys

    @override
    def load(self, job: Job) -> None:
        self._post(m.LoadJob(job=job.number, keys=job.keys, slots=job.slots))
        self._keys[job.number] = job.keys

    @override
    def ended(self) -> Sequence[int]:
        numbers = []
        self._tier.poll()
        for message in self._answers.take():
            if isinstance(message, m.TierBroke):
                raise StoreFault(f"the disk tier broke: {message.reason}")
            if isinstance(message, m.ProbeAnswer):
                self._is_open = True
            if isinstance(message, m.JobEnded):
                _check_outcomes(message)
                numbers.append(message.job)
                # Each job is a request's, which is over with it: the policy is to know.
                self._post(
                    m.RequestEnded(request=str(message.job), order=self._keys.pop(message.job))
                )
        return numbers

    @override
    def end_step(self) -> None:
        self._tier.wake()

    @override
    def counters(self) -> Mapping[str, int]:
        self._tier.poll()
        return self._answers.counted

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
        self._post(m.Probe(probe=0, keys=()))
        self._tier.wake()
        deadline_s = time.monotonic() + OPEN_TIMEOUT_S
        while not self._is_open:
            self.ended()
            if time.monotonic() > deadline_s:
                raise InternalError(f"{self.name}: not open after {OPEN_TIMEOUT_S:.0f} s")
            time.sleep(POLL_S)


class KVTierSide(TierSide):
    """kvtier's ``disk`` tier. ``key_file``: encrypts with the key in it."""

    def __init__(self, setup: DiskSetup, key_file: Path | None = None) -> None:
        name = ENCRYPTED if key_file else KVTIER
        capacity_bytes = int(CAPACITY_LEGS * setup.leg_bytes)
        is_large = capacity_bytes >= REGIONS_MIN * REGION_BYTES
        options = {
            "type": "disk",
            "path": str(side_folder(setup, name)),
            "capacity_bytes": capacity_bytes,
            **({"region_bytes": REGION_BYTES} if is_large else {}),
            "io_depth": setup.threads,
            # What is loaded here was stored last; lru evicts what was stored first.
            "eviction_policy": "lru",
            **({"encryption_key_file": str(key_file)} if key_file else {}),
        }
        super().__init__(name, setup, options)

    @property
    @override
    def is_direct(self) -> bool:
        return "direct_refused" not in self.counters()


class FsSide(TierSide):
    """kvtier's ``fs`` tier: a file a block, as vLLM's has, with a digest in each."""

    def __init__(self, setup: DiskSetup) -> None:
        self._takes_direct = fs_takes_direct(setup.folder)
        options = {
            "type": "fs",
            "root_dir": str(side_folder(setup, KVTIER_FS)),
            "n_read_threads": setup.threads,
            "n_write_threads": setup.threads,
        }
        super().__init__(KVTIER_FS, setup, options)

    @override
    def forget(self) -> None:
        empty_files(self.folder)

    @property
    @override
    def is_direct(self) -> bool:
        return self._takes_direct and "direct_refused" not in self.counters()


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


class _Recorder:
    """Stands where the engine cell has its end of the tier."""

    def __init__(self) -> None:
        self.waiting: deque[Message] = deque()
        self.counted: Mapping[str, int] = {}  # by the backend, as last reported

    def post(self, message: Message) -> bool:
        """Keep the message."""
        if isinstance(message, m.Counted):
            self.counted = message.counters
        else:
            self.waiting.append(message)
        return True

    def take(self) -> list[Message]:
        """Return what has come since the last call."""
        return [self.waiting.popleft() for _ in range(len(self.waiting))]


def _check_outcomes(message: m.JobEnded) -> None:
    # Counted first: names for each block would be a pause of the busy thread's own.
    if message.outcomes.count(Outcome.DONE) < len(message.outcomes):
        others = {Outcome(outcome).name for outcome in message.outcomes} - {Outcome.DONE.name}
        raise StoreFault(
            f"the disk tier ended job {message.job} with {', '.join(sorted(others))} "
            "for some of its blocks; its log says why"
        )
