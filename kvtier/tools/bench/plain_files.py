"""Plain files: one pwrite or pread for each block, in threads.

``fs`` is compared with a file for each block, ``disk`` with one file for all: the bare disk.

They use O_DIRECT if the tier does: otherwise a load would measure the page cache.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final

from typing_extensions import override

from kvtier.errors import Misuse
from kvtier.plugin_api.options import Options
from kvtier.plugin_api.threads import DaemonThreads
from kvtier.tools.bench.plain_clients import CALLS_AT_ONCE, PlainClient, expect_blocks

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvtier.plugin_api.backend import BackendContext


CAPACITY_LEGS: Final = 4
"""Legs that a ``disk`` tier gets room for: it reclaims the room of removed blocks later."""

CAPACITY_BYTES_MIN: Final = 64 << 20


class PlainFiles(PlainClient):
    """A folder below the tier's, which exists already."""

    folder_option: ClassVar[str] = "root_dir"
    what: ClassVar[str] = "files"

    def __init__(self, options: Mapping[str, Any], context: BackendContext, token: str) -> None:
        super().__init__(options, context, token)
        reader = Options(options, f"secondary tier {context.tier_name}")
        root = reader.path(self.folder_option)
        if not os.path.isdir(root):
            raise Misuse(f"--tier: {self.folder_option} {root!r} is no folder. Make it first.")
        self._folder = os.path.join(root, f"kvtier-bench-{token}")
        self._files = os.path.join(self._folder, "plain")
        self._flags = os.O_DIRECT if reader.flag("direct", default=True) else 0
        self._threads = DaemonThreads(max(CALLS_AT_ONCE), "plain-files")
        self.library = self.what

    @override
    def options_of_tier(self, part: str, leg_bytes: int) -> dict[str, Any]:
        return {**self.options, self.folder_option: os.path.join(self._folder, part)}

    @override
    async def open(self, memory: memoryview) -> None:
        os.makedirs(self._files, mode=0o700)
        self._flags = self._flags if takes_direct(self._files) else 0
        self.library = f"{self.what}, {'O_DIRECT' if self._flags else 'page cache'}"

    @override
    async def store(self, way: str, names: Sequence[str], views: Sequence[memoryview]) -> None:
        await self._threads.run(partial(self._write_all, names, views))

    @override
    async def load(self, way: str, names: Sequence[str], views: Sequence[memoryview]) -> None:
        lengths = await self._threads.run(partial(self._read_all, names, views))
        expect_blocks(lengths, self.context.block_bytes)

    @override
    async def remove(self, names: Sequence[str]) -> None:
        for name in names:
            os.unlink(os.path.join(self._files, name))

    @override
    async def remove_all(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    @override
    async def close(self) -> None:
        self._threads.stop()
        await self.remove_all()  # the tier makes folders even where it then refuses

    def _write_all(self, names: Sequence[str], views: Sequence[memoryview]) -> None:
        expect_blocks(list(map(self._write, names, views)), self.context.block_bytes)

    def _read_all(self, names: Sequence[str], views: Sequence[memoryview]) -> list[int]:
        return list(map(self._read, names, views))

    def _write(self, name: str, view: memoryview) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | self._flags
        descriptor = os.open(os.path.join(self._files, name), flags, 0o600)
        try:
            return os.pwrite(descriptor, view, 0)
        finally:
            os.close(descriptor)

    def _read(self, name: str, view: memoryview) -> int:
        flags = os.O_RDONLY | os.O_CLOEXEC | self._flags
        descriptor = os.open(os.path.join(self._files, name), flags)
        try:
            return os.preadv(descriptor, [view], 0)
        finally:
            os.close(descriptor)


class PlainDisk(PlainFiles):
    """One file below the tier's folder, in which each block has its place."""

    folder_option: ClassVar[str] = "path"
    what: ClassVar[str] = "one file"
    is_shared: ClassVar[bool] = False
    share_promised: ClassVar[float] = 0.85
    warm_up_legs: ClassVar[int] = CAPACITY_LEGS
    """Stores into regions that were never written take twice as long: the extents are new."""

    def __init__(self, options: Mapping[str, Any], context: BackendContext, token: str) -> None:
        super().__init__(options, context, token)
        self._place_of: dict[str, int] = {}  # by name, in bytes from the file's start
        self._unused: list[int] = []
        self._descriptor = -1

    @override
    def options_of_tier(self, part: str, leg_bytes: int) -> dict[str, Any]:
        capacity = max(CAPACITY_LEGS * leg_bytes, CAPACITY_BYTES_MIN)
        return {**super().options_of_tier(part, leg_bytes), "capacity_bytes": capacity}

    @override
    async def open(self, memory: memoryview) -> None:
        await super().open(memory)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | self._flags
        self._descriptor = os.open(os.path.join(self._files, "blocks"), flags, 0o600)

    @override
    async def store(self, way: str, names: Sequence[str], views: Sequence[memoryview]) -> None:
        for name in names:
            end = len(self._place_of) * self.context.block_bytes
            self._place_of[name] = self._unused.pop() if self._unused else end
        await super().store(way, names, views)

    @override
    async def remove(self, names: Sequence[str]) -> None:
        self._unused += [self._place_of.pop(name) for name in names]

    @override
    async def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
        await super().close()

    @override
    def _write(self, name: str, view: memoryview) -> int:
        return os.pwrite(self._descriptor, view, self._place_of[name])

    @override
    def _read(self, name: str, view: memoryview) -> int:
        return os.preadv(self._descriptor, [view], self._place_of[name])


def takes_direct(folder: str) -> bool:
    """Return whether files in a folder can be opened with O_DIRECT."""
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        try:
            os.close(os.open(file.name, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT))
        except OSError:
            return False
    return True
