"""What ``stress.bench`` makes of its times, and the simulated tier of ``decide``.

Running the benchmarks: ``tests/vllm/bench``.
"""

from __future__ import annotations

from itertools import islice, pairwise

import anyio
import anyio.lowlevel
import pytest

from stress.bench.decide import (
    AUTO,
    LOAD,
    OPTIONS,
    RECOMPUTE,
    cell_figures,
    cells_of,
    noticed_after,
)
from stress.bench.harness import orders, ratio, read_options
from stress.bench.rated_tier import Rate, RatedDevice

BLOCK_BYTES = 1000
HALF_A_SECOND = Rate(bytes_per_s=2 * BLOCK_BYTES)  # for each block


def test_sides_take_turns_in_going_first_and_each_order_comes_as_often() -> None:
    two = list(islice(orders("ab"), 6))
    assert all(first != then for first, then in pairwise(two))
    three = list(islice(orders("abc"), 12))
    assert all(three.count(order) == 2 for order in three)


@pytest.mark.parametrize(("run_by_run", "found", "holds"), [(False, 0.5, True), (True, 1.0, False)])
def test_a_ratio_is_that_of_medians_or_the_median_of_the_runs(
    run_by_run: bool, found: float, holds: bool
) -> None:
    each = ratio([1.0, 6.0, 2.0], [1.0, 4.0, 8.0], at_most=0.5, run_by_run=run_by_run)
    assert each == {
        "ratio": found,
        "of_runs": [1.0, 1.5, 0.25],
        "bar": "<= 0.50",
        "holds": holds,
    }


def test_cells_go_from_the_fastest_tier_to_the_one_that_hangs() -> None:
    """A tier that has become faster takes a while to be noticed; that is the step's to show."""
    options = ("--rates", "hang,2MB,2GB", "--prompts", "4_000,1000", "--clients", "8,1")
    cells = cells_of(read_options(OPTIONS, "decide", options))
    assert list(dict.fromkeys(cell.tier for cell in cells)) == ["2GB/s", "2MB/s", "hang"]
    sizes = [(cell.tokens, cell.clients) for cell in cells[:4]]
    assert sizes == [(1000, 1), (1000, 8), (4000, 1), (4000, 8)]
    assert cells[0].rate.bytes_per_s == 2e9
    assert cells[-1].rate.hangs


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
