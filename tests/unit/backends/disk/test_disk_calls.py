"""Calls begin at once, and end whatever becomes of their caller."""

from __future__ import annotations

import asyncio
import gc

import pytest

from kvtier_backends.disk.log.calls import Calls, begin

pytestmark = pytest.mark.anyio


async def test_a_call_runs_up_to_its_first_wait_before_its_caller_goes_on() -> None:
    said: list[str] = []
    go_on = asyncio.get_running_loop().create_future()

    async def call() -> str:
        said.append("begun")
        said.append(await go_on)
        await asyncio.sleep(0)
        said.append("waited once more")
        return "ended"

    running = begin(call())
    assert said == ["begun"]
    assert not running.done()
    go_on.set_result("went on")
    assert await running == "ended"
    assert said == ["begun", "went on", "waited once more"]


@pytest.mark.parametrize("waits", [False, True])
async def test_what_a_call_raises_is_its_callers_and_one_that_never_waits_has_ended_at_once(
    waits: bool,
) -> None:
    async def call() -> None:
        if waits:
            await asyncio.sleep(0)
        raise OSError(5, "sick")

    running = begin(call())
    assert running.done() is not waits
    with pytest.raises(OSError, match="sick"):
        await running


async def test_a_call_that_is_cancelled_may_clean_up_and_wait_for_that() -> None:
    said: list[str] = []

    async def call() -> str:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            await asyncio.sleep(0)
            said.append("cleaned up")

    running = begin(call())
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert said == ["cleaned up"]


async def test_calls_may_wait_for_calls_and_for_locks() -> None:
    calls, lock, order = Calls(), asyncio.Lock(), []

    async def inner(number: int) -> int:
        async with lock:
            await asyncio.sleep(0)
            order.append(number)
        return number

    async def outer(number: int) -> int:
        return await calls.shielded(inner(number)) + 100

    running = [calls.start(outer(number)) for number in range(5)]
    assert not calls.is_idle()
    assert await asyncio.gather(*running) == [100, 101, 102, 103, 104]
    assert order == [0, 1, 2, 3, 4]
    await calls.wait_idle()
    assert calls.is_idle()


async def test_a_shielded_call_ends_though_its_caller_is_cancelled() -> None:
    calls = Calls()
    go_on = asyncio.get_running_loop().create_future()
    said: list[str] = []

    async def call() -> None:
        said.append(await go_on)

    caller = asyncio.get_running_loop().create_task(calls.shielded(call()))
    await asyncio.sleep(0)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert not calls.is_idle()
    go_on.set_result("ended")
    await calls.wait_idle()
    assert said == ["ended"]


def test_a_call_that_nobody_ends_is_closed_with_its_loop() -> None:
    said: list[str] = []

    async def call() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            said.append("closed")

    async def leave_it() -> None:
        begin(call())

    loop = asyncio.new_event_loop()
    loop.run_until_complete(leave_it())
    loop.close()
    gc.collect()
    assert said == ["closed"]
