"""Loads of the ``fs`` tier beside stores that it was given before."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import pytest

from kvtier.plugin_api import store_turns
from kvtier.plugin_api.backend import LoadBlock, Loaded, Outcome, StoreBlock
from kvtier.plugin_api.slot_memory import SlotMemory
from kvtier.tier import driver_messages as d
from kvtier.tier.backend_driver import BackendDriver
from kvtier_backends.fs.files import BlockFiles
from tests.support.patience import PATIENCE_S, until
from tests.unit.backends.fs._fs import BLOCK_BYTES, key_of, make_fs

if TYPE_CHECKING:
    from pathlib import Path

WRITERS = 4
BLOCKS = 3  #: in each batch
SLOTS = tuple(range(BLOCKS))
LOAD = 100  #: number of its batch


@pytest.mark.anyio
async def test_stores_that_have_begun_wait_for_a_load_between_two_blocks_and_go_on_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_turns, "HELD_S_MAX", PATIENCE_S)
    written: list[bytes] = []
    all_write = threading.Barrier(WRITERS + 1)
    is_loading, has_loaded = threading.Event(), threading.Event()
    oldest = key_of(1)
    real_store, real_load = BlockFiles.store, BlockFiles.load

    def store(files: BlockFiles, block: StoreBlock) -> Outcome:
        """Be in the middle of each batch's first block when the load begins."""
        if not is_loading.is_set():
            all_write.wait(PATIENCE_S)
            assert is_loading.wait(PATIENCE_S)
        if block.key == oldest:  # whose batch alone may go on
            assert has_loaded.wait(PATIENCE_S)
        written.append(block.key)
        return real_store(files, block)

    def load(files: BlockFiles, block: LoadBlock) -> Loaded:
        is_loading.set()
        until(lambda: len(written) >= WRITERS - 1)
        return real_load(files, block)

    def report(message: Any) -> None:
        ended[message.batch] = message.outcomes
        if message.batch == LOAD:
            assert len(written) == WRITERS - 1
            has_loaded.set()

    ended: dict[int, Any] = {}
    backend = make_fs(tmp_path / "kv", n_write_threads=WRITERS)
    await backend.open()
    slots = SlotMemory.anonymous(BLOCKS + 1, BLOCK_BYTES)
    driver = BackendDriver("1:fs", backend, slots, report)

    def store_batch(batch: int, *numbers: int) -> None:
        keys = tuple(key_of(number) for number in numbers)
        driver.receive(d.StoreBatch(batch, keys, SLOTS[: len(keys)], ()))

    def wait_for_writers(count: int) -> None:
        until(lambda: all_write.n_waiting == count)

    async with asyncio.TaskGroup() as tasks:
        driver.begin(tasks)
        store_batch(0, 0)
    monkeypatch.setattr(BlockFiles, "store", store)
    monkeypatch.setattr(BlockFiles, "load", load)
    async with asyncio.TaskGroup() as tasks:
        driver.begin(tasks)
        for batch in range(1, 1 + WRITERS):
            first = 1 + (batch - 1) * BLOCKS
            store_batch(batch, *range(first, first + BLOCKS))
            await asyncio.to_thread(wait_for_writers, batch)
        await asyncio.to_thread(all_write.wait, PATIENCE_S)
        driver.receive(d.LoadBatch(LOAD, (key_of(0),), (BLOCKS,)))
    assert set(ended) == {0, LOAD, *range(1, 1 + WRITERS)}
    assert {outcome for outcomes in ended.values() for outcome in outcomes} == {Outcome.DONE}
    assert len(written) == WRITERS * BLOCKS
    await backend.close()
    driver.stop()
