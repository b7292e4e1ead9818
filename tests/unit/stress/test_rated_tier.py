"""The simulated tier of ``stress.bench decide``: how long what takes, by a clock of the test's."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel
import pytest

from kvtier.plugin_api.backend import BackendContext, LoadBlock, Namespace, Outcome, StoreBlock
from kvtier.settings.plugins import backend_class
from stress.bench.rated_tier import (
    TYPE_NAME,
    Rate,
    RatedBackend,
    RatedDevice,
    register,
)

if TYPE_CHECKING:
    from pathlib import Path

BLOCK_BYTES = 1000
HALF_A_SECOND = Rate(bytes_per_s=2 * BLOCK_BYTES)  # for each block


class Clock:
    """Time passes only where the device sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        await anyio.lowlevel.checkpoint()


class Timed:
    """A device, and when each of its loads ended."""

    def __init__(self) -> None:
        self.rate = HALF_A_SECOND
        self.clock = Clock()
        self.device = RatedDevice(
            lambda: self.rate, now=lambda: self.clock.now, sleep=self.clock.sleep
        )
        self.ended: dict[str, float] = {}

    async def move(self, name: str, blocks: int) -> None:
        await self.device.move(blocks, BLOCK_BYTES)
        self.ended[name] = self.clock.now


def test_loads_come_one_after_the_other_and_take_what_their_bytes_take() -> None:
    timed = Timed()

    async def both() -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(timed.move, "first", 4)
            group.start_soon(timed.move, "second", 4)

    anyio.run(both)
    assert timed.ended == {"first": pytest.approx(2.0), "second": pytest.approx(4.0)}


def test_the_next_block_goes_at_a_new_rate() -> None:
    timed = Timed()

    async def slow_down() -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(timed.move, "only", 4)
            while timed.clock.now < 1.0:
                await anyio.lowlevel.checkpoint()
            timed.rate = Rate(bytes_per_s=BLOCK_BYTES / 10)

    anyio.run(slow_down)
    assert timed.ended["only"] == pytest.approx(2 * 0.5 + 2 * 10.0)


def test_nothing_ends_while_it_hangs_and_all_does_afterwards() -> None:
    timed = Timed()
    timed.rate = Rate(hangs=True)

    async def hang() -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(timed.move, "only", 2)
            while timed.clock.now < 100.0:
                await anyio.lowlevel.checkpoint()
            assert timed.ended == {}
            timed.rate = HALF_A_SECOND

    anyio.run(hang)
    assert timed.ended["only"] == pytest.approx(timed.clock.now)
    assert timed.clock.now > 100.0


def test_a_rate_that_is_faster_than_any_sleep_is_kept_on_the_whole() -> None:
    timed = Timed()
    timed.rate = Rate(bytes_per_s=BLOCK_BYTES * 10_000)
    anyio.run(timed.move, "only", 1000)
    assert timed.ended["only"] == pytest.approx(0.1, abs=0.001)


def test_it_keeps_what_it_is_given_and_goes_at_the_rate_of_its_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    context = BackendContext(BLOCK_BYTES, Namespace({}), "1:rated")
    backend = RatedBackend.from_options({"capacity_bytes": 10 * BLOCK_BYTES}, context)
    assert isinstance(backend, RatedBackend)
    monkeypatch.setattr(RatedBackend, "rate", Rate(hangs=True))
    assert backend.device.rate().hangs
    monkeypatch.setattr(RatedBackend, "rate", Rate())
    assert not backend.device.rate().hangs
    block, buffer = b"b" * BLOCK_BYTES, bytearray(BLOCK_BYTES)

    async def store_and_load() -> Outcome:
        await backend.store([StoreBlock(b"k", memoryview(block), b"digest")])
        (loaded,) = await backend.load([LoadBlock(b"k", memoryview(buffer))])
        return loaded.outcome

    assert anyio.run(store_and_load) is Outcome.DONE
    assert bytes(buffer) == block


def test_it_is_a_tier_only_where_it_is_registered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Users are not offered it."""
    from kvtier.errors import ConfigError

    with pytest.raises(ConfigError, match="is not installed"):
        backend_class(TYPE_NAME)
    monkeypatch.setattr(sys, "path", [*sys.path])
    register(tmp_path)
    assert backend_class(TYPE_NAME) is RatedBackend
