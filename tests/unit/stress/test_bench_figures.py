"""What ``stress.bench`` makes of its times, and the simulated tier of ``decide``.

Running the benchmarks: ``tests/vllm/bench``.
"""

from __future__ import annotations

from itertools import islice, pairwise
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel
import pytest

from stress.bench.decide import (
    AUTO,
    LOAD,
    OPTIONS,
    RECOMPUTE,
    cell_figures,
    noticed_after,
    read_plan,
)
from stress.bench.harness import orders, ratio, read_options
from stress.bench.rated_tier import Rate, RatedDevice

if TYPE_CHECKING:
    from stress.bench.decide import Plan

BLOCK_BYTES = 1000
HALF_A_SECOND = Rate(bytes_per_s=2 * BLOCK_BYTES)  # for each block


def test_sides_take_turns_in_going_first_and_each_order_comes_as_often() -> None:
    two = list(islice(orders("ab"), 6))
    assert all(first != then for first, then in pairwise(two))
    three = list(islice(orders("abc"), 12))
    assert all(three.count(order) == 2 for order in three)


def test_a_ratio_is_that_of_medians_beside_those_of_the_runs() -> None:
    found = ratio([1.0, 6.0, 2.0], [2.0, 4.0, 8.0])
    assert found == {"ratio": 0.5, "ratio_min": 0.25, "ratio_max": 1.5}


def plan_of(*options: str) -> Plan:
    return read_plan(read_options(OPTIONS, "decide", options))


def test_cells_go_from_the_fastest_tier_to_the_one_that_hangs() -> None:
    """A tier that has become faster takes a while to be noticed; that is the step's to show."""
    cells = plan_of(
        "--rates", "hang,2MB,2GB", "--prompts", "4_000,1000", "--clients", "8,1"
    ).cells()
    assert list(dict.fromkeys(cell.speed.name for cell in cells)) == ["2GB/s", "2MB/s", "hang"]
    assert [(cell.tokens, cell.clients) for cell in cells[:4]] == [
        (1000, 1),
        (1000, 8),
        (4000, 1),
        (4000, 8),
    ]
    assert cells[0].speed.rate.bytes_per_s == 2e9
    assert cells[-1].speed.rate.hangs


def test_a_step_is_between_the_fastest_and_the_slowest_tier_that_moves() -> None:
    speeds = plan_of("--rates", "hang,2MB,20MB/s,2GB").step_speeds
    assert speeds is not None
    assert [speed.name for speed in speeds] == ["2GB/s", "2MB/s"]
    assert plan_of("--rates", "hang,2MB").step_speeds is None


def test_a_cell_is_judged_by_the_better_of_both_choices() -> None:
    found = cell_figures({LOAD: [1.0, 3.0], RECOMPUTE: [5.0], AUTO: [1.0, 2.0, 3.0, 4.0]})
    assert found["better"] == LOAD
    assert found["ratio"] == pytest.approx(2.5 / 2.0)
    assert found["ratio_of_medians"] == pytest.approx(2.5 / 2.0)


@pytest.mark.parametrize(
    ("times", "after"),
    [
        ([1.0] * 8, 0),
        ([9.0, 9.0, 9.0, 1.0, 1.0, 1.0, 1.0, 1.0], 1),
        ([9.0] * 5 + [1.0, 9.0, 1.0, 9.0, 1.05], 5),
        ([9.0] * 8, None),
    ],
)
def test_a_step_is_noticed_from_where_most_requests_are_as_fast_as_the_better_choice(
    times: list[float], after: int | None
) -> None:
    assert noticed_after(times, 1.0) == after


class Timed:
    """A device, and when each of its loads ended. Time passes only where the device sleeps."""

    def __init__(self, rate: Rate) -> None:
        self.rate = rate
        self.now = 0.0
        self.device = RatedDevice(lambda: self.rate, now=lambda: self.now, sleep=self._sleep)
        self.ended: list[float] = []

    async def _sleep(self, seconds: float) -> None:
        self.now += seconds
        await anyio.lowlevel.checkpoint()

    async def move(self, blocks: int) -> None:
        await self.device.move(blocks, BLOCK_BYTES)
        self.ended.append(self.now)

    async def change(self, at_s: float, rate: Rate) -> None:
        """Go at another rate from then on. By then nothing may have ended."""
        while self.now < at_s:
            await anyio.lowlevel.checkpoint()
        assert self.ended == []
        self.rate = rate


@pytest.mark.anyio
async def test_loads_come_one_after_the_other_and_take_what_their_bytes_take() -> None:
    timed = Timed(HALF_A_SECOND)
    async with anyio.create_task_group() as group:
        for _ in range(2):
            group.start_soon(timed.move, 4)
    assert timed.ended == pytest.approx([2.0, 4.0])
    fast = Timed(Rate(bytes_per_s=BLOCK_BYTES * 10_000))  # faster than any sleep
    await fast.move(1000)
    assert fast.ended == pytest.approx([0.1], abs=0.001)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("first", "at_s", "then", "ends_s"),
    [
        (HALF_A_SECOND, 1.0, Rate(bytes_per_s=BLOCK_BYTES / 10), 2 * 0.5 + 2 * 10.0),
        (Rate(hangs=True), 100.0, HALF_A_SECOND, 102.0),
    ],
)
async def test_the_next_block_goes_at_a_new_rate(
    first: Rate, at_s: float, then: Rate, ends_s: float
) -> None:
    timed = Timed(first)
    async with anyio.create_task_group() as group:
        group.start_soon(timed.move, 4)
        group.start_soon(timed.change, at_s, then)
    assert timed.ended == pytest.approx([ends_s], abs=0.1)
