"""What the tests of the disk backend share: a context, and blocks in and out of it."""

from __future__ import annotations

import os
import subprocess
import time
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any

from kvtier.plugin_api.backend import (
    BackendContext,
    LoadBlock,
    Loaded,
    Namespace,
    Outcome,
    StoreBlock,
    block_digest,
)
from kvtier.plugin_api.slot_memory import SlotMemory
from kvtier_backends.disk import DiskBackend
from tests.support.folder_files import files_of
from tests.unit.backends._media import key_of as key_of
from tests.unit.backends._media import mount, start_python, tmpfs, unmount

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Iterator
    from pathlib import Path

    from kvtier_backends.disk.log.block_log import BlockLog

BLOCK_BYTES = 8192
CAPACITY_BYTES = 2 << 20
CONTEXT = BackendContext(BLOCK_BYTES, Namespace({"model_name": "org/m", "dtype": "bf16"}), "1:disk")
OTHER_CONTEXT = BackendContext(BLOCK_BYTES, Namespace({"model_name": "org/other"}), "1:disk")


def data_of(number: int, block_bytes: int = BLOCK_BYTES) -> bytes:
    return number.to_bytes(8, "big") * (block_bytes // 8)


class Clock:
    """The backend's clock: the real one, until a test sets it."""

    now_s: float | None = None

    def __call__(self) -> float:
        return time.time() if self.now_s is None else self.now_s


class Disk:
    """An open backend, some slots, and shorthand."""

    def __init__(self, backend: DiskBackend, clock: Clock | None = None) -> None:
        self.backend = backend
        self.clock = clock or Clock()
        self.block_bytes = backend._context.block_bytes
        self.slots = SlotMemory.anonymous(64, self.block_bytes)
        self.lost: list[bytes] = []
        backend.on_lost = self.lost.extend

    @property
    def log(self) -> BlockLog:
        assert self.backend._log is not None
        return self.backend._log

    @property
    def capacity(self) -> int:
        assert self.backend.traits.capacity_blocks is not None
        return self.backend.traits.capacity_blocks

    def contents(self) -> list[bytes]:
        return [key for keys in self.backend.contents() for key in keys]

    async def store(self, *numbers: int) -> list[Outcome]:
        blocks = []
        for slot, number in enumerate(numbers):
            view = self.slots.view(slot)
            view[:] = data_of(number, self.block_bytes)
            blocks.append(StoreBlock(key_of(number), view, block_digest(key_of(number), view)))
        return list(await self.backend.store(blocks))

    async def load(self, *numbers: int) -> list[Outcome]:
        """Load, and judge the bytes as the layer above would."""
        views = self.slots.views(range(len(numbers)))
        for view in views:
            view[:] = bytes(len(view))
        loaded = await self.backend.load(
            [LoadBlock(key_of(n), view) for n, view in zip(numbers, views, strict=True)]
        )
        return [self.checked(*each) for each in zip(numbers, views, loaded, strict=True)]

    def checked(self, number: int, view: memoryview, loaded: Loaded) -> Outcome:
        if loaded.outcome is not Outcome.DONE:
            return loaded.outcome
        if block_digest(key_of(number), view) != loaded.digest:
            return Outcome.DAMAGED
        assert view == data_of(number, self.block_bytes), "wrong bytes with a digest that fits them"
        return Outcome.DONE

    async def remove(self, *numbers: int) -> None:
        await self.backend.remove([key_of(number) for number in numbers])

    async def found(self, numbers: Iterable[int]) -> list[int]:
        return [number for number in numbers if await self.load(number) == [Outcome.DONE]]

    async def come_to_rest(self) -> None:
        """Wait for what a store leaves behind: a region that is opened or emptied ahead."""
        await self.log.calls.wait_idle()

    def count(self, name: str) -> int:
        return self.backend.counters().get(name, 0)


def key_options(folder: Path, *keys: str) -> dict[str, Any]:
    """Return the options of a tier that encrypts with these keys, in a file there; none without."""
    file = folder / "keys"
    file.write_text("# keys\n" + "\n".join(keys) + "\n")
    file.chmod(0o600)
    return {"encryption_key_file": str(file)} if keys else {}


def make_disk(
    path: Path | str,
    context: BackendContext = CONTEXT,
    clock: Callable[[], float] = time.time,
    **options: Any,
) -> DiskBackend:
    class ClockedBackend(DiskBackend):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given, clock)

    given = {"path": os.fspath(path), "capacity_bytes": CAPACITY_BYTES, **options}
    return ClockedBackend.from_options(given, context)


@asynccontextmanager
async def open_disk(
    path: Path | str, context: BackendContext = CONTEXT, **options: Any
) -> AsyncIterator[Disk]:
    clock = Clock()
    backend = make_disk(path, context, clock, **options)
    await backend.open()
    try:
        yield Disk(backend, clock)
    finally:
        await backend.close()


@contextmanager
def two_filesystems(folder: Path) -> Iterator[tuple[Path, Path]]:
    """Make two filesystems; yield a place where the first is seen, and the second. Root only."""
    with tmpfs(folder / "first", "4m") as first, tmpfs(folder / "second", "4m") as second:
        place = folder / "place"
        place.mkdir()
        mount("--bind", first, place)
        try:
            yield place, second
        finally:
            unmount(place)


async def fill(
    path: Path, blocks: int, context: BackendContext = CONTEXT, **options: Any
) -> list[int]:
    """Store so many blocks, five at once; returns their numbers."""
    async with open_disk(path, context, **options) as disk:
        for first in range(0, blocks, 5):
            assert await disk.store(*range(first, first + 5)) == [Outcome.DONE] * 5
    return list(range(blocks))


def folder_bytes(path: Path) -> int:
    """Return what the folder holds, by length and by blocks, whichever is more."""
    files = list(files_of(path))
    return max(sum(f.st_size for f in files), sum(512 * f.st_blocks for f in files))


HOLDER = """
import os, sys
from kvtier.errors import ConfigError
from kvtier_backends.disk.folder.claim import Claim
held = Claim(sys.argv[1], ConfigError, user_pid=int(sys.argv[2]) or os.getpid())
print("claimed", flush=True)
sys.stdin.read()
"""


@contextmanager
def holding(path: Path, user_pid: int = 0) -> Iterator[subprocess.Popen[str]]:
    """Have another process claim the folder, for that user or for itself; yield it."""
    arguments = "-c", HOLDER, path, str(user_pid)
    with start_python(*arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "claimed\n"
        try:
            yield holder
        finally:
            holder.kill()
