"""One leg: all jobs of one kind on one side, from a thread that is idle or busy in between.

A job is what either scheduler gives a tier: some blocks, with their keys and slots, to be stored or
loaded together. The thread is what the scheduler's is: it submits jobs and asks what has ended.
Idle, it sleeps in between, as it does while the GPU computes. Busy, it computes in Python: then
the longest time between two of its iterations is how long the tier's threads have kept it from its
work.
"""

from __future__ import annotations

import errno
import os
import time
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final, NamedTuple

from kvtier.errors import InternalError
from kvtier.tools.held_signals import HeldSignals

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

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
        path = self.folder / "direct"
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
            longest = max(longest, now - last)
            last = now
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
        longest = max(longest, now - last)
        last = now
    return longest


def _compute() -> None:
    total = 0
    for number in range(BUSY_ADDITIONS):
        total += number
