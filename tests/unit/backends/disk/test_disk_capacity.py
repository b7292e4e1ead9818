"""What a tier of a large capacity costs before it is used, and which capacities cannot be."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from kvtier.errors import ConfigError
from kvtier.plugin_api.backend import Outcome
from kvtier_backends.disk.folder import capacity
from tests.support.needs import needs
from tests.unit.backends._media import tmpfs
from tests.unit.backends.disk._disk import make_disk, open_disk

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.anyio

OPEN = """
import asyncio, os, sys
from pathlib import Path
from kvtier.plugin_api.backend import BackendContext, Namespace
from kvtier_backends.disk import DiskBackend

def resident():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")

async def open_it():
    context = BackendContext(65536, Namespace({}), "1:disk")
    before = resident()
    options = {"path": sys.argv[1], "capacity_bytes": 10 << 40}
    backend = DiskBackend.from_options(options, context)
    await backend.open()
    print(resident() - before)
    await backend.close()

asyncio.run(open_it())
"""


def test_an_empty_folder_takes_no_memory_for_its_capacity(tmp_path: Path) -> None:
    """10 TiB took 1.6 GB before the first block. In a process of its own: nothing was freed."""
    run = subprocess.run(
        [sys.executable, "-c", OPEN, tmp_path / "kv"], capture_output=True, text=True, check=True
    )
    assert int(run.stdout.splitlines()[-1]) < 64 << 20


@needs("mount")
async def test_a_capacity_beyond_the_disk_is_told_and_works(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "small", "8m") as mounted:
        async with open_disk(mounted / "kv", capacity_bytes=64 << 20) as disk:
            assert disk.count("capacity_beyond_the_disk") == 1
            assert await disk.store(1) == [Outcome.DONE]
        async with open_disk(mounted / "other") as disk:
            assert disk.count("capacity_beyond_the_disk") == 0
            assert disk.count("index_beyond_memory") == 0


@needs("mount")
async def test_a_filesystem_that_reports_no_size_bounds_neither_capacity_nor_index(
    tmp_path: Path,
) -> None:
    with tmpfs(tmp_path / "boundless", "0") as mounted:
        async with open_disk(mounted / "kv") as disk:
            assert disk.count("capacity_beyond_the_disk") == 0
            plan = disk.backend._plan
        takes = capacity.index_bytes(str(mounted), plan, 0)
    assert takes == plan.regions * plan.geometry.slots * capacity.INDEX_BYTES_PER_BLOCK


async def test_an_index_beyond_a_quarter_of_the_free_memory_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_disk(tmp_path / "kv")._plan
    takes = capacity.index_bytes(str(tmp_path), plan, 0)
    monkeypatch.setattr(capacity, "machine_memory_bytes", lambda: 99 * takes)
    monkeypatch.setattr(capacity, "free_memory_bytes", lambda: 4 * takes)
    async with open_disk(tmp_path / "kv") as disk:
        assert disk.count("index_beyond_memory") == 0
    monkeypatch.setattr(capacity, "free_memory_bytes", lambda: takes)
    async with open_disk(tmp_path / "kv") as disk:
        assert disk.count("index_beyond_memory") == 1


async def test_an_index_beyond_all_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    takes = capacity.index_bytes(str(tmp_path), make_disk(tmp_path / "kv")._plan, 0)
    monkeypatch.setattr(capacity, "machine_memory_bytes", lambda: takes - 1)
    with pytest.raises(ConfigError, match=r"capacity_bytes=.* wants an index of .*lower it to"):
        make_disk(tmp_path / "kv")
    for name in ("machine_memory_bytes", "free_memory_bytes"):
        monkeypatch.setattr(capacity, name, lambda: None)
    make_disk(tmp_path / "kv")  # the folder was released, and what nobody knows refuses nothing
