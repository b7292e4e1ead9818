"""Loads before stores; and stores go on, whatever the loads do."""

from __future__ import annotations

import asyncio

import pytest

from kvtier_backends.disk.log.load_priority import LoadPriority

pytestmark = pytest.mark.anyio


class Stores:
    """Stores that wait for their priority, and end when they are told to."""

    def __init__(self, priority: LoadPriority) -> None:
        self.priority = priority
        self.running: list[int] = []
        self.ends: dict[int, asyncio.Event] = {}
        self.tasks: dict[int, asyncio.Task[None]] = {}

    async def begin(self, *numbers: int) -> None:
        for number in numbers:
            self.ends[number] = asyncio.Event()
            self.tasks[number] = asyncio.create_task(self._store(number))
        await settle()

    async def end(self, *numbers: int) -> None:
        for number in numbers:
            self.ends[number].set()
            await self.tasks[number]
        await settle()

    async def _store(self, number: int) -> None:
        async with self.priority.store():
            self.running.append(number)
            await self.ends[number].wait()
            self.running.remove(number)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_beside_a_load_only_so_many_stores_go_on_and_without_one_all_of_them() -> None:
    priority = LoadPriority(2)
    stores = Stores(priority)
    await stores.begin(1, 2, 3)
    assert stores.running == [1, 2, 3]
    with priority.load():
        await stores.begin(4, 5)
        await stores.end(1)
        assert stores.running == [2, 3], "those that began before count"
        await stores.end(2)
        assert stores.running == [3, 4]
    await settle()
    assert stores.running == [3, 4, 5]
    await stores.end(3, 4, 5)


async def test_under_loads_without_end_every_store_gets_its_turn_in_order() -> None:
    """There is a load at any moment: the next one begins before the last one ends."""
    priority = LoadPriority(0)  # which is one: some store always goes on
    stores = Stores(priority)
    load = priority.load()
    load.__enter__()
    await stores.begin(1, 2, 3)
    for number in (1, 2, 3):
        next_load = priority.load()
        next_load.__enter__()
        load.__exit__(None, None, None)
        load = next_load
        await settle()
        assert stores.running == [number]
        await stores.end(number)
    load.__exit__(None, None, None)


@pytest.mark.parametrize("its_turn_comes", [False, True])
async def test_a_store_that_is_cancelled_passes_its_turn_on(*, its_turn_comes: bool) -> None:
    priority = LoadPriority(1)
    stores = Stores(priority)
    with priority.load():
        await stores.begin(1, 2, 3)
        if its_turn_comes:
            stores.ends[1].set()
            await asyncio.sleep(0)  # the first ends here, and hands its turn to the second
        stores.tasks[2].cancel()
        await settle()
        await stores.end(1)
        assert stores.running == [3]
        await stores.end(3)
