"""A purge in a folder that an engine uses erases nothing that a load still reads."""

from __future__ import annotations

import asyncio
import os
import threading
from typing import TYPE_CHECKING, Any

import pytest

from kvtier.plugin_api.backend import Outcome
from kvtier_backends.disk import backend as backend_module
from kvtier_backends.disk.offline import purging
from kvtier_backends.disk.offline.purge_requests import ask_engine
from tests.unit.backends.disk._disk import key_of, open_disk
from tests.unit.backends.disk.test_disk_purge import ALL, ask, begin_reclaim, on_disk

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_module, "TICK_S", 0.01)


class HungRead:
    """The next read of a block hangs until it is released, and then reads what is there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered, self.release = threading.Event(), threading.Event()
        self._read = os.preadv
        monkeypatch.setattr(os, "preadv", self)

    def __call__(self, *arguments: Any) -> int:
        self.entered.set()
        self.release.wait()
        return self._read(*arguments)


async def test_a_load_that_has_begun_gets_its_block_before_a_purge_erases_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would read zeros, which count as damage: a false alarm about a sound disk."""
    path = tmp_path / "kv"
    async with open_disk(path) as disk:
        log = disk.log
        await disk.store(1, 2)
        hung = HungRead(monkeypatch)
        loading = asyncio.ensure_future(disk.load(1))
        await asyncio.to_thread(hung.entered.wait)
        real, asked = log.regions.is_grace_period_over, 0

        def is_grace_period_over(region: int, mark: int) -> bool:
            nonlocal asked
            asked += region == 0
            if asked == 3:  # it waits
                assert disk.lost == [key_of(1), key_of(2)]
                assert on_disk(path, range(1, 3)) == [1, 2]
                hung.release.set()
            return real(region, mark)

        monkeypatch.setattr(log.regions, "is_grace_period_over", is_grace_period_over)
        assert await ask(path, ALL) == 2
        assert asked >= 3
        assert await loading == [Outcome.DONE]
        assert on_disk(path, range(1, 3)) == []


async def test_a_region_whose_load_hangs_is_left_as_it_is_and_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(purging, "LOADS_END_S_MAX", 0.0)
    path = tmp_path / "kv"
    async with open_disk(path) as disk:
        await disk.store(1)
        hung = HungRead(monkeypatch)
        loading = asyncio.ensure_future(disk.load(1))
        await asyncio.to_thread(hung.entered.wait)
        assert await asyncio.to_thread(ask_engine, str(path), ALL, lambda: None) == ([], 1)
        assert list(await disk.backend.probe([key_of(1)])) == [False]
        assert on_disk(path, range(1, 2)) == [1]
        hung.release.set()
        assert await loading == [Outcome.DONE]
        assert await ask(path, ALL) == 1
        assert on_disk(path, range(1, 2)) == []


async def test_a_region_that_a_reclaim_reads_is_purged_in_the_next_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads until it may append, and that waits for the purge: neither may wait for both."""
    path = tmp_path / "kv"
    async with open_disk(path) as disk:
        log = disk.log
        await disk.store(*range(40))
        real, emptied = purging._forget, False

        async def forget(*arguments: Any) -> None:
            nonlocal emptied
            if not emptied:
                emptied = True
                region = begin_reclaim(log)
                asyncio.get_running_loop().call_soon(asyncio.ensure_future, append(region))
            await real(*arguments)

        async def append(region: int) -> None:
            async with log.opening:  # as it does to append
                log.regions.unpin(region)

        monkeypatch.setattr(purging, "_forget", forget)
        assert await ask(path, ALL) == 40
        assert emptied
        assert on_disk(path, range(40)) == []
