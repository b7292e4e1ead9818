"""Filesystems that cannot reserve room, or that tell of less than they were asked to keep."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

import pytest

from kvtier.plugin_api.backend import Outcome
from tests.support.fuse_folder import fuse_folder
from tests.support.needs import needs
from tests.unit.backends.disk._disk import make_disk, open_disk

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.anyio, needs("fuse")]
REFUSALS = [errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL]


@pytest.mark.parametrize("compresses", [False, True], ids=["plain", "compressed"])
@pytest.mark.parametrize("number", [0, *REFUSALS], ids=["reserves", "OPNOTSUPP", "NOSYS", "INVAL"])
async def test_blocks_are_stored_and_found_after_a_restart_whatever_fallocate_says(
    number: int, compresses: bool, tmp_path: Path
) -> None:
    with fuse_folder(tmp_path) as folder:
        if number:
            folder.begin("no room kept", "fail", "fallocate", error=number)
        if compresses:
            folder.begin("no room told", "compress", "getattr")
        for life in range(3):
            before, new = range(20 * life), range(20 * life, 20 * (life + 1))
            async with open_disk(folder.path / "kv") as disk:
                assert await disk.found(before) == list(before)
                assert await disk.store(*new) == [Outcome.DONE] * len(new)
                assert await disk.found(range(new.stop)) == [*before, *new]
                assert disk.count("room_not_reserved") == int(number != 0)


async def test_files_that_cannot_be_reserved_are_lengthened_without_a_write(
    tmp_path: Path,
) -> None:
    """The C library's own emulation would write a byte of every page."""
    with fuse_folder(tmp_path) as folder:
        folder.begin("no room kept", "fail", "fallocate", error=errno.EOPNOTSUPP)
        backend = make_disk(folder.path / "kv")
        await backend.open()
        folder.begin("watched", "delay", "write", seconds=0.0)
        device, plan = backend._devices[-1], backend._plan
        await device.allocate(1)
        await device.allocate(0)
        assert folder.done().get("delay", 0) == 0
        length = (folder.source / "kv" / "segment-00000.kv").stat().st_size
        assert length == 2 * plan.geometry.region_bytes, "the second cut nothing off the first"
        await backend.close()


async def test_a_full_disk_without_reservation_is_full_and_serves_what_it_has(
    tmp_path: Path,
) -> None:
    with fuse_folder(tmp_path) as folder:
        folder.begin("no room kept", "fail", "fallocate", error=errno.EOPNOTSUPP)
        async with open_disk(folder.path / "kv") as disk:
            assert await disk.store(1, 2) == [Outcome.DONE] * 2
            await disk.come_to_rest()
            folder.begin("full", "full", "write", error=errno.ENOSPC)
            for _ in range(3):
                assert await disk.store(3, 4) == [Outcome.FULL] * 2
            assert await disk.found([1, 2, 3, 4]) == [1, 2]
            folder.end("full")
            assert await disk.store(3, 4) == [Outcome.DONE] * 2
            assert await disk.found([1, 2, 3, 4]) == [1, 2, 3, 4]
