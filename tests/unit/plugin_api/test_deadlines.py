"""A call knows how long anybody waits for it, and knows nothing of other calls."""

from __future__ import annotations

import asyncio

from kvtier.plugin_api.deadlines import NEVER, set_deadline, time_left_s, time_limit


def test_a_call_without_a_deadline_has_all_the_time() -> None:
    assert time_left_s() == NEVER


def test_time_that_is_over_is_no_time() -> None:
    with time_limit(-1.0):
        assert time_left_s() == 0.0
    assert time_left_s() == NEVER


def test_a_limit_within_a_limit_gives_no_more_time() -> None:
    with time_limit(0.0), time_limit(1000.0):
        assert time_left_s() == 0.0


def test_a_task_has_its_own_deadline() -> None:
    async def call(clock_s: float) -> float:
        set_deadline(clock_s)
        await asyncio.sleep(0)
        return time_left_s()

    async def calls() -> tuple[float, float]:
        async with asyncio.TaskGroup() as tasks:
            late, early = tasks.create_task(call(1e12)), tasks.create_task(call(0.0))
        return late.result(), early.result()

    late, early = asyncio.run(calls())
    assert early == 0.0
    assert late > 0.0
    assert time_left_s() == NEVER
