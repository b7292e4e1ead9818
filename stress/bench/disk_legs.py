"""One leg: all jobs of one kind on one side, from a thread that is idle or busy in between.

The thread is what the scheduler's is: it submits jobs and asks what has ended.
Idle, it sleeps in between, as it does while the GPU computes. Busy, it computes
in Python: then the longest time between two of its iterations is how long the
tier's threads have kept it from its work.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

from kvtier.errors import InternalError
from kvtier.tools.held_signals import HeldSignals

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stress.bench.disk_sides import DiskSide, Job

IDLE_POLL_S: Final = 0.0005
BUSY_ADDITIONS: Final = 2_000  #: in one iteration: about 50 us
LEG_TIMEOUT_S: Final = 600.0


class DiskLeg(NamedTuple):
    """What one leg took. Times in seconds."""

    seconds: float
    job_seconds: list[float]  #: from submitting a job until its end was seen
    longest_pause_s: float  #: from one iteration of the thread to the next
    cpu_seconds: float  #: of all threads, those of the side's own processes too


def play(
    side: DiskSide,
    submit: Callable[[Job], None],
    jobs: Sequence[Job],
    *,
    in_flight: int,
    busy: bool,
) -> DiskLeg:
    """Give ``submit``, one of the side's, all jobs, and keep ``in_flight`` of them under way.

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
                submit(job)
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
