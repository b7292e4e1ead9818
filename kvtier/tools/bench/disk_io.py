"""Compares two ways to talk to the kernel, for the disk tier: threads and io_uring.

Threads are what the tier uses (``preadv`` and ``pwritev``, ``FileDevice``). The
ring is written here, on the package ``liburing``, which kvtier does not need:
``pip install liburing`` to run this. Both keep to ``Device``, and move the same
bytes to and from the same file, O_DIRECT, ``--depth`` transfers at a time, in
turns within one run. Measured for each: GB/s, processor time, and the longest
pause of a thread that runs Python all the while, as vLLM's scheduler does.

Machines are shared and noisy: compare the two, and quote no figure by itself.
"""

from __future__ import annotations

import argparse
import asyncio
import errno
import mmap
import os
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kvtier_backends.disk.device import SEGMENT_NAME, Device, FileDevice, Segments, Transfer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SIZES_KIB: Final = (64, 256, 1024, 2048)
REGION_BYTES: Final = 64 << 20
SPIN: Final = 2_000  #: steps of the busy thread between two looks at the clock, some 50 µs


class RingDevice(Device):
    """Segment file 0 through one io_uring, driven by the event loop's own thread.

    Completions ring an eventfd that the loop watches. What moves short is not
    tried again: for a benchmark, that is a failure.
    """

    def __init__(self, folder: str, depth: int) -> None:
        import liburing  # type: ignore[import-not-found,unused-ignore] # noqa: PLC0415

        self._api: Any = liburing
        self._file = os.open(f"{folder}/{SEGMENT_NAME.format(0)}", os.O_RDWR | os.O_DIRECT)
        self._ring = liburing.Ring()
        liburing.io_uring_queue_init(depth, self._ring)
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        liburing.io_uring_register_eventfd(self._ring, self._bell)
        self._one = liburing.Cqe()
        self._free = asyncio.Semaphore(depth)
        self._waiting: dict[int, tuple[asyncio.Future[int], object]] = {}
        self._next = 0
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._bell, self._reap)
        self._is_prepared = False

    async def read(self, transfers: Sequence[Transfer]) -> list[int | OSError]:
        """Read all at once."""
        prepare = self._api.io_uring_prep_readv
        return list(await asyncio.gather(*(self._move(prepare, each) for each in transfers)))

    async def write(self, transfers: Sequence[Transfer]) -> OSError | None:
        """Write one after the other."""
        for transfer in transfers:
            end = await self._move(self._api.io_uring_prep_writev, transfer)
            if isinstance(end, OSError):
                return end
        return None

    async def allocate(self, region: int) -> None:
        """Do nothing: the file is there."""

    def busy(self) -> int:
        """Count what is in the ring."""
        return len(self._waiting)

    def close(self) -> None:
        """Take the ring down. Only when nothing is busy."""
        self._loop.remove_reader(self._bell)
        self._api.io_uring_queue_exit(self._ring)
        os.close(self._bell)
        os.close(self._file)

    async def _move(self, prepare: Callable[..., None], transfer: Transfer) -> int | OSError:
        async with self._free:
            self._next += 1
            vector = self._api.Iovec(transfer.buffers)
            future: asyncio.Future[int] = self._loop.create_future()
            self._waiting[self._next] = (future, vector)  # the kernel reads the vector
            entry = self._api.io_uring_get_sqe(self._ring)
            prepare(entry, self._file, vector, transfer.region * REGION_BYTES + transfer.at)
            entry.user_data = self._next
            if not self._is_prepared:
                self._is_prepared = True
                self._loop.call_soon(self._submit)
            moved = await future
        if moved == transfer.size:
            return moved
        return OSError(-moved if moved < 0 else errno.EIO, "moved short")

    def _submit(self) -> None:
        """Hand the kernel everything prepared in this round of the loop, in one call."""
        self._is_prepared = False
        self._api.io_uring_submit(self._ring)

    def _reap(self) -> None:
        os.eventfd_read(self._bell)
        for _ in range(self._api.io_uring_cq_ready(self._ring)):
            self._api.io_uring_wait_cqe(self._ring, self._one)
            future, _vector = self._waiting.pop(self._one[0].user_data)
            future.set_result(self._one[0].res)
            self._api.io_uring_cq_advance(self._ring, 1)


class Result(NamedTuple):
    """What one pass over the bytes took."""

    gb_s: float
    cpu_s_per_gb: float
    pause_ms: float


async def move_all(device: Device, kind: str, transfers: list[Transfer], depth: int) -> None:
    """Move every transfer, ``depth`` at a time. Raises ``OSError`` if one fails."""
    left = iter(transfers)

    async def work() -> None:
        for transfer in left:
            if kind == "store":
                end: object = await device.write([transfer])
            else:
                (end,) = await device.read([transfer])
            if isinstance(end, OSError):
                raise end

    await asyncio.gather(*(work() for _ in range(depth)))


def measure(
    make: Callable[[], Device], kind: str, transfers: list[Transfer], depth: int, *, busy: bool
) -> Result:
    """Move every transfer in a loop in a thread of its own, as a tier's cell does."""
    took: list[float] = []
    failed: list[BaseException] = []

    async def run() -> None:
        device = make()
        start = time.perf_counter(), time.process_time()
        await move_all(device, kind, transfers, depth)
        took.extend((time.perf_counter() - start[0], time.process_time() - start[1]))
        device.close()

    def body() -> None:
        try:
            asyncio.run(run())
        except BaseException as error:  # noqa: BLE001 - raised again below
            failed.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    longest = spin_until_dead(thread) if busy else 0.0
    thread.join()
    if failed:
        raise failed[0]
    moved_gb = sum(transfer.size for transfer in transfers) / 1e9
    return Result(moved_gb / took[0], took[1] / moved_gb, longest * 1e3)


def spin_until_dead(thread: threading.Thread) -> float:
    """Run Python until the thread ends; returns the longest time between two looks, in s."""
    longest, last = 0.0, time.perf_counter()
    while thread.is_alive():
        count = 0
        for step in range(SPIN):
            count += step
        now = time.perf_counter()
        longest = max(longest, now - last)
        last = now
    return longest


def lay_out(size: int, total: int, memory: memoryview) -> list[Transfer]:
    """Cut the first ``total`` bytes of the file and of memory into transfers."""
    return [
        Transfer(at // REGION_BYTES, at % REGION_BYTES, [memory[at : at + size]])
        for at in range(0, total, size)
    ]


def makers(folder: str, depth: int) -> dict[str, Callable[[], Device]]:
    """Return how to make each device."""

    def threads() -> Device:
        return FileDevice(
            Segments(folder, REGION_BYTES, 1 << 20),
            direct=True,
            read_threads=depth,
            write_threads=depth,
            name="bench",
            on_direct_refused=lambda error: print(
                f"O_DIRECT is refused here: {error}", file=sys.stderr
            ),
            on_not_reserved=lambda error: print(
                f"Room cannot be reserved here: {error}", file=sys.stderr
            ),
        )

    return {"threads": threads, "io_uring": lambda: RingDevice(folder, depth)}


def print_table(results: dict[tuple[int, str, bool, str], list[Result]]) -> None:
    """Print medians, and for pauses what was best and worst."""
    print(f"{'KiB':>5} {'':6} {'thread':6} {'':9} {'GB/s':>6} {'cpu s/GB':>9} {'pause ms':>16}")
    for (size, kind, busy, name), each in results.items():
        pauses = [result.pause_ms for result in each]
        print(
            f"{size >> 10:5} {kind:6} {'busy' if busy else 'idle':6} {name:9} "
            f"{statistics.median(r.gb_s for r in each):6.2f} "
            f"{statistics.median(r.cpu_s_per_gb for r in each):9.3f} "
            + (f"{min(pauses):7.1f} to {max(pauses):5.1f}" if busy else "")
        )


def main() -> None:
    """Measure and print one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="on the disk to measure")
    parser.add_argument("--depth", type=int, default=8, help="transfers at a time (%(default)s)")
    parser.add_argument("--mib", type=int, default=512, help="moved each time (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="of each (%(default)s)")
    options = parser.parse_args()
    total = options.mib << 20
    memory = memoryview(mmap.mmap(-1, total))
    memory[:] = os.urandom(1 << 20) * options.mib
    results: dict[tuple[int, str, bool, str], list[Result]] = defaultdict(list)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        with open(f"{folder}/{SEGMENT_NAME.format(0)}", "wb") as file:
            os.posix_fallocate(file.fileno(), 0, total)
            file.write(memory)
            os.fsync(file.fileno())
        for _ in range(options.rounds):
            for size in (kib << 10 for kib in SIZES_KIB):
                transfers = lay_out(size, total, memory)
                for kind in ("store", "load"):
                    for busy in (False, True):
                        for name, make in makers(folder, options.depth).items():
                            result = measure(make, kind, transfers, options.depth, busy=busy)
                            results[size, kind, busy, name].append(result)
    print_table(results)


if __name__ == "__main__":
    main()
