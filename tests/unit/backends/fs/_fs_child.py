"""Stores blocks until it is killed, or under a limit on open files. Run with ``-m``."""

from __future__ import annotations

import asyncio
import os
import resource
import sys

import structlog

from kvtier.plugin_api.backend import Outcome
from tests.unit.backends.fs._fs import open_fs


async def store_for_ever(root: str) -> None:
    async with open_fs(root) as fs:
        number = 0
        while True:
            await asyncio.gather(*(fs.store(number + step) for step in range(8)))
            number += 8
            print(number, flush=True)


async def run_out_of_descriptors(root: str) -> None:
    async with open_fs(root) as fs:
        assert await fs.store(1) is Outcome.DONE
        assert await fs.load(1) is Outcome.DONE
        used = max(int(entry.name) for entry in os.scandir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 8, used + 8))
        held = []
        try:
            while True:
                held.append(os.dup(0))
        except OSError:
            pass
        assert await fs.load(1) is Outcome.FAILED
        assert await fs.store(2) is Outcome.FAILED
        assert await fs.probe(1)
        for descriptor in held:
            os.close(descriptor)
        assert await fs.load(1) is Outcome.DONE
        assert await fs.load(2) is Outcome.ABSENT
        assert await fs.store(2) is Outcome.DONE
        assert fs.count("loads_failed") == 1
        assert fs.count("stores_failed") == 1


async def hit_the_file_size_limit(root: str) -> None:
    """The stand-in for a full disk where nothing may be mounted."""
    async with open_fs(root) as fs:
        assert await fs.store(1) is Outcome.DONE
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
        assert await fs.store(2) is Outcome.FULL
        assert await fs.load(1) is Outcome.DONE
        assert fs.temporaries() == []


if __name__ == "__main__":
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    asyncio.run(globals()[sys.argv[1]](sys.argv[2]))
