"""Opens a tier's folder as another user, stores and finds blocks: ``python -m`` this.

``USER GROUP TYPE FOLDER STORED WANTED``: how many blocks to store, and how many must be found
before. The user is changed here and not by whoever starts this: Python may be root's alone.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from dataclasses import replace

import structlog

from kvtier.errors import ConfigError
from kvtier.plugin_api.backend import Outcome
from tests.unit.backends.disk._disk import open_disk
from tests.unit.backends.fs._fs import CONTEXT, open_fs


async def main(kind: str, folder: str, stored: int, wanted: int) -> None:
    numbers = range(wanted, wanted + stored)
    if kind == "disk":
        async with open_disk(folder) as disk:
            assert await disk.found(range(wanted)) == list(range(wanted))
            assert await disk.store(*numbers) == [Outcome.DONE] * stored
        return
    async with open_fs(folder, replace(CONTEXT, read_only=kind == "fs-reader")) as fs:
        assert [await fs.load(number) for number in range(wanted)] == [Outcome.DONE] * wanted
        assert [await fs.store(number) for number in numbers] == [Outcome.DONE] * stored


if __name__ == "__main__":
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    user, group, kind, folder, stored, wanted = sys.argv[1:]
    # What is imported late is imported now, by a folder that is begun, and opened again: the user
    # may not be allowed to read Python's packages.
    with tempfile.TemporaryDirectory() as tried:
        asyncio.run(main(kind.removesuffix("-reader"), f"{tried}/kv", 8, 0))
        asyncio.run(main(kind.removesuffix("-reader"), f"{tried}/kv", 8, 8))
        import numpy.ma  # noqa: F401 - for some orders of what a folder has
    os.umask(0o007)
    os.setgroups([])
    os.setgid(int(group))
    os.setuid(int(user))
    try:
        asyncio.run(main(kind, folder, int(stored), int(wanted)))
    except ConfigError as refusal:
        print(refusal)
        sys.exit(3)
