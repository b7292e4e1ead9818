"""Files by themselves: one pwrite or pread for each block, in threads.

With O_DIRECT where the tier uses it, too: otherwise a load would measure the page cache.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from functools import partial
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from kvtier.errors import Misuse
from kvtier.plugin_api.options import Options
from kvtier.plugin_api.threads import DaemonThreads
from kvtier.tools.bench.plain_clients import CALLS_AT_ONCE, PlainClient, expect_blocks

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvtier.plugin_api.backend import BackendContext


class PlainFiles(PlainClient):
    """A folder below the tier's ``root_dir``, which is there already."""

    def __init__(self, options: Mapping[str, Any], context: BackendContext, token: str) -> None:
        super().__init__(options, context, token)
        reader = Options(options, f"secondary tier {context.tier_name}")
        root = reader.path("root_dir")
        if not os.path.isdir(root):
            raise Misuse(f"--tier: root_dir {root!r} is no folder. Make it first.")
        self._folder = os.path.join(root, f"kvtier-bench-{token}")
        self._files = os.path.join(self._folder, "plain")
        self._flags = os.O_DIRECT if reader.flag("direct", default=True) else 0
        self._threads = DaemonThreads(max(CALLS_AT_ONCE), "plain-files")
        self.library = "files"

    @override
    def options_of_tier(self, part: str) -> dict[str, Any]:
        return {**self.options, "root_dir": os.path.join(self._folder, part)}

    @override
    async def open(self, memory: memoryview) -> None:
        os.makedirs(self._files, mode=0o700)
        self._flags = self._flags if _takes_direct(self._files) else 0
        self.library = "files, O_DIRECT" if self._flags else "files, page cache"

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
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | self._flags
        lengths = []
        for name, view in zip(names, views, strict=True):
            descriptor = os.open(os.path.join(self._files, name), flags, 0o600)
            try:
                lengths.append(os.pwrite(descriptor, view, 0))
            finally:
                os.close(descriptor)
        expect_blocks(lengths, self.context.block_bytes)

    def _read_all(self, names: Sequence[str], views: Sequence[memoryview]) -> list[int]:
        lengths = []
        for name, view in zip(names, views, strict=True):
            flags = os.O_RDONLY | os.O_CLOEXEC | self._flags
            descriptor = os.open(os.path.join(self._files, name), flags)
            try:
                lengths.append(os.preadv(descriptor, [view], 0))
            finally:
                os.close(descriptor)
        return lengths


def _takes_direct(folder: str) -> bool:
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        try:
            os.close(os.open(file.name, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT))
        except OSError:
            return False
    return True
