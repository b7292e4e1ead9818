"""Lookups of the ``fs`` tier: how many run at once, and what they stay clear of."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import anyio
import pytest

from kvtier_backends.fs.files import BlockFiles
from tests.support.patience import PATIENCE_S
from tests.unit.backends.fs._fs import key_of, open_fs

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.anyio


async def test_as_many_lookups_run_at_once_as_there_are_threads_that_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a network filesystem each takes half a millisecond, in which nothing is done here."""
    threads = 5
    together = threading.Barrier(threads)
    look = BlockFiles.exists

    def exists(files: BlockFiles, key: bytes) -> bool:
        together.wait(PATIENCE_S)
        return look(files, key)

    async with open_fs(tmp_path / "kv", n_read_threads=threads) as fs:
        await fs.store(1)
        monkeypatch.setattr(BlockFiles, "exists", exists)
        answers: dict[int, bool] = {}

        async def probe(number: int) -> None:
            (answers[number],) = await fs.backend.probe([key_of(number)])

        async with anyio.create_task_group() as group:
            for number in range(threads):
                group.start_soon(probe, number)
        assert answers == {number: number == 1 for number in range(threads)}


async def test_hung_loads_hold_up_no_lookup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_fs(tmp_path / "kv", n_read_threads=2) as fs:
        await fs.store(1)
        healed = threading.Event()
        load = BlockFiles.load

        def hang(files: BlockFiles, block: object) -> object:
            assert healed.wait(PATIENCE_S)
            return load(files, block)  # type: ignore[arg-type]

        monkeypatch.setattr(BlockFiles, "load", hang)
        async with anyio.create_task_group() as group:
            for _ in range(3):
                group.start_soon(fs.load, 1)
            await anyio.lowlevel.checkpoint()
            with anyio.fail_after(PATIENCE_S):
                assert await fs.probe(1)
                assert not await fs.probe(2)
            healed.set()
