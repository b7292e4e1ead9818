"""The master of the store is away, killed, stopped, or comes back empty: misses, and recovery."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from kvtier.errors import StoreFault
from kvtier.plugin_api.backend import Connection, Outcome
from kvtier_backends.shared import kept_connection
from tests.support.mooncake_server import Cluster, running
from tests.support.patience import pause, until_true
from tests.unit.backends.mooncake._mooncake import begin_mooncake, open_mooncake

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


async def test_without_a_master_nothing_waits_and_once_it_is_there_blocks_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_connection, "PAUSE_S_MAX", 0.25)
    cluster = Cluster(tmp_path)
    async with begin_mooncake(cluster.address) as mooncake:
        assert mooncake.states == [Connection.CONNECTING]
        assert await mooncake.store(1) is Outcome.FAILED
        assert await mooncake.load(1) is Outcome.FAILED
        with pytest.raises(StoreFault, match="not reached"):
            await mooncake.probe(1)
        with pytest.raises(StoreFault, match="not reached"):
            await mooncake.backend.remove([b"key"])
        await until_true(lambda: mooncake.count("connects_failed") > 1)
        assert mooncake.states == [Connection.CONNECTING]
        try:
            cluster.start()
            await mooncake.until_up()
            assert await mooncake.store(1) is Outcome.DONE
            assert await mooncake.load(1) is Outcome.DONE
        finally:
            cluster.kill()


async def test_a_master_that_was_killed_and_comes_back_empty_is_used_again(tmp_path: Path) -> None:
    """The client, and the owner of the memory, reconnect; the slots are still registered."""
    with running(tmp_path) as cluster:
        async with open_mooncake(cluster.address) as mooncake:
            assert await mooncake.store(1) is Outcome.DONE
            cluster.master.kill()
            assert await mooncake.load(1) is Outcome.FAILED
            await mooncake.until_gone()
            assert await mooncake.load(1) is Outcome.FAILED
            assert await mooncake.store(2) is Outcome.FAILED
            cluster.master.start()
            await mooncake.until_up()
            assert await mooncake.load(1) is Outcome.ABSENT
            assert not await mooncake.probe(1)
            while await mooncake.store(1) is Outcome.FULL:  # until the owner is back, too
                pause()
            assert await mooncake.load(1) is Outcome.DONE
            assert mooncake.states == [
                Connection.CONNECTING,
                Connection.UP,
                Connection.GONE,
                Connection.UP,
            ]


@pytest.mark.usefixtures("_short_waits")
async def test_a_master_that_is_stopped_costs_a_call_its_time_and_nothing_else(
    tmp_path: Path,
) -> None:
    with running(tmp_path) as cluster:
        async with open_mooncake(cluster.address) as mooncake:
            assert await mooncake.store(1) is Outcome.DONE
            cluster.master.stop()
            given_up = asyncio.create_task(mooncake.load(1))
            await until_true(lambda: mooncake.backend.busy_threads() == 1)
            given_up.cancel()
            await asyncio.wait([given_up])
            assert given_up.cancelled()
            assert mooncake.backend.busy_threads() == 1  # its slot may still be written to
            with pytest.raises(StoreFault):
                await mooncake.probe(1)
            await mooncake.until_gone()
            await until_true(lambda: mooncake.backend.busy_threads() == 0)
            cluster.master.go_on()
            await mooncake.until_up()
            assert await mooncake.load(1) is Outcome.DONE
