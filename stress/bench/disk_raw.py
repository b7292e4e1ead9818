"""What the disk gives with nothing around it: ``pwritev`` or ``preadv``, in threads.

One preallocated file, O_DIRECT, the same slots and jobs as the tiers have: no
keys, no index, no digests, nothing is ever evicted. The first rounds, which are
not measured, write all of the file: what is written first converts its extents.
A call moves some blocks of a job, ``CALL_BYTES`` at most: a job of large blocks in a
single call would keep fewer threads busy than the tiers have.
"""

from __future__ import annotations

import errno
import os
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

from typing_extensions import override

from kvtier.errors import StoreFault
from stress.bench.disk_sides import DiskSetup, DiskSide, Job

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

RAW: Final = "raw"
CALL_BYTES: Final = 8 << 20
_FLAGS: Final = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC


class RawSide(DiskSide):
    """A file as long as one leg. A job's blocks lie one behind the other."""

    def __init__(self, setup: DiskSetup) -> None:
        super().__init__(RAW, setup)
        self._memory = setup.memory
        self._places: dict[bytes, int] = {}  # first key of a job → where its blocks begin
        self._free = 0
        self._bytes = setup.leg_bytes
        self._ended: deque[tuple[int, Future[None]]] = deque()
        self._unended: dict[int, int] = {}  # job → how many of its calls have not ended
        self.folder.mkdir()
        self._descriptor, self._is_direct = _open(self.folder / "raw")
        os.posix_fallocate(self._descriptor, 0, self._bytes)
        self._threads = ThreadPoolExecutor(setup.threads, thread_name_prefix="raw")

    @override
    def store(self, job: Job) -> None:
        self._places[job.keys[0]] = self._free
        self._free += len(job.keys) * self._memory.block_bytes
        self._begin(os.pwritev, job)

    @override
    def load(self, job: Job) -> None:
        self._begin(os.preadv, job)

    def _begin(self, call: Callable[[int, list[memoryview], int], int], job: Job) -> None:
        views, at = self._memory.views(job.slots), self._places[job.keys[0]]
        block_bytes = self._memory.block_bytes
        size = max(1, CALL_BYTES // block_bytes)
        starts = range(0, len(views), size)
        self._unended[job.number] = len(starts)
        for start in starts:
            some, place = views[start : start + size], at + start * block_bytes
            future = self._threads.submit(_move, call, self._descriptor, some, place)
            future.add_done_callback(lambda done: self._ended.append((job.number, done)))

    @override
    def ended(self) -> Sequence[int]:
        numbers = []
        while self._ended:
            number, future = self._ended.popleft()
            future.result()  # raises what the call raised
            self._unended[number] -= 1
            if not self._unended[number]:
                del self._unended[number]
                numbers.append(number)
        return numbers

    @override
    def forget(self) -> None:
        self._places.clear()
        self._free = 0

    @property
    @override
    def is_direct(self) -> bool:
        return self._is_direct

    @override
    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)
        os.close(self._descriptor)


def _open(path: os.PathLike[str]) -> tuple[int, bool]:
    """Return a descriptor, and whether it was opened with O_DIRECT."""
    try:
        return os.open(path, _FLAGS | os.O_DIRECT, 0o600), True
    except OSError as refused:
        if refused.errno != errno.EINVAL:
            raise
        return os.open(path, _FLAGS, 0o600), False


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
