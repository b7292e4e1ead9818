"""Calls that are given up, and replies that end: what other faults cost is in one table for all.

See ``tests/conformance/test_storage_faults.py``.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from structlog.testing import capture_logs

from kvtier.errors import StoreFault
from kvtier.plugin_api.backend import Connection, LoadBlock, Outcome, StoreBlock, block_digest
from kvtier_backends.shared import kept_connection
from tests.support.patience import until_true
from tests.unit.backends.redis._cutting_proxy import cutting_proxy
from tests.unit.backends.redis._redis import BLOCK_BYTES, GUARD, data_of, key_of, open_redis

if TYPE_CHECKING:
    from tests.support.redis_servers import RedisServer

pytestmark = pytest.mark.anyio
SHORT_S = 0.2


async def test_a_call_without_time_is_not_sent(valkey_server: RedisServer) -> None:
    async with open_redis(valkey_server.url) as tier:
        assert await tier.store(1) == [Outcome.DONE]
        assert await tier.load(1, within_s=0.0) == [Outcome.FAILED]
        assert tier.count("connections_lost") == 0
        assert await tier.load(1) == [Outcome.DONE]


async def test_each_time_that_a_server_is_lost_is_logged_once(
    valkey_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, though nobody uses the tier: until its next check lookups would be sent nowhere."""
    monkeypatch.setattr(kept_connection, "STEADY_S", 0.0)  # else it would be one episode
    with capture_logs() as lines:
        async with open_redis(valkey_server.url) as tier:
            await tier.until(Connection.UP)
            for lost in (1, 2):
                valkey_server.kill()
                await until_true(lambda lost=lost: tier.count("connection_gone") == lost)
                tries = tier.count("connects_failed")
                await until_true(lambda tries=tries: tier.count("connects_failed") > tries + 2)
                valkey_server.start()
                await tier.until(Connection.UP)
    said = [line["event"].partition(",")[0] for line in lines]
    assert said == ["redis tier: not connected", "redis tier: connected"] * 2


async def test_a_server_without_room_for_a_check_goes_on_serving_the_tiers_connections(
    valkey_server: RedisServer,
) -> None:
    """Each check gave up the connections that worked: once in ten seconds, the tier was gone."""
    async with open_redis(valkey_server.url) as tier:
        assert await tier.store(1) == [Outcome.DONE]
        with valkey_server.connected() as asks:
            there = asks("INFO", "clients")["connected_clients"]
            asks("CONFIG", "SET", "maxclients", there)

            def has_refused(checks: int) -> bool:
                is_gone = tier.states[-1] is not Connection.UP
                return is_gone or asks("INFO", "stats")["rejected_connections"] >= checks

            for checks in (1, 2):  # the first has ended when the second is refused
                tier.backend._watch.doubt()
                await until_true(lambda checks=checks: has_refused(checks))
            assert await tier.load(1) == [Outcome.DONE]
            assert tier.states == [Connection.CONNECTING, Connection.UP]
            with capture_logs() as lines:
                async with open_redis(valkey_server.url) as other:
                    assert await other.load(1) == [Outcome.FAILED]
                    assert other.states == [Connection.CONNECTING]
            assert "maxclients" in lines[0]["remedy"]


async def test_a_call_ends_after_its_own_time_though_nobody_set_a_deadline(
    valkey_server: RedisServer,
) -> None:
    """``remove`` has none."""
    async with open_redis(valkey_server.url) as tier:
        assert await tier.store(1) == [Outcome.DONE]
        valkey_server.stop()
        tier.backend._batches._call_timeout_s = SHORT_S
        with pytest.raises(StoreFault):
            await tier.backend.remove([key_of(1)])
        valkey_server.go_on()


@pytest.mark.parametrize("arrived", [0, 3, BLOCK_BYTES + BLOCK_BYTES // 2])
async def test_nothing_is_written_to_a_slot_once_its_load_was_cancelled(
    valkey_server: RedisServer, arrived: int
) -> None:
    """The rest of a reply comes late, when a part of the block may be in its slot already."""
    async with cutting_proxy(valkey_server.port) as proxy, open_redis(proxy.url) as tier:
        assert await tier.store(1, 2) == [Outcome.DONE] * 2
        proxy.goes_on = asyncio.Event()
        proxy.left_bytes = arrived
        blocks = [LoadBlock(key_of(n), tier.slots.view(8 + n)) for n in (1, 2)]
        call = asyncio.create_task(tier.backend.load(blocks))
        await until_true(lambda: proxy.is_holding)
        call.cancel()
        await asyncio.wait([call])
        assert tier.backend.busy_threads() == 0
        for block in blocks:
            block.buffer[:] = GUARD
        proxy.goes_on.set()
        assert await tier.load(1, 2) == [Outcome.DONE] * 2  # over another connection
        assert all(block.buffer == GUARD for block in blocks)


async def test_a_cancelled_store_sends_nothing_of_what_its_slot_holds_next(
    valkey_server: RedisServer,
) -> None:
    async with open_redis(valkey_server.url) as tier:
        await tier.until(Connection.UP)
        valkey_server.stop()
        views = [tier.slots.view(n) for n in range(40)]  # more than the sockets' buffers
        for n, view in enumerate(views):
            view[:] = data_of(n)
        blocks = [
            StoreBlock(key_of(n), view, block_digest(key_of(n), view))
            for n, view in enumerate(views)
        ]
        call = asyncio.create_task(tier.backend.store(blocks))
        await until_true(lambda: tier.backend._pool._lent)
        call.cancel()
        await asyncio.wait([call])
        for view in views:
            view[:] = GUARD
        valkey_server.go_on()
        for n in range(40):
            assert await tier.load(n) in ([Outcome.DONE], [Outcome.ABSENT])  # whole, or not there
        assert tier.count("blocks_damaged") == 0


CUTS = [
    (3, 0),  # in the length
    (2000, 0),
    (BLOCK_BYTES - 1, 0),
    (BLOCK_BYTES + 40, 0),  # in the trailer
    (2 * BLOCK_BYTES, 1),
]


@pytest.mark.parametrize(("cut_at", "whole"), CUTS)
async def test_a_connection_that_ends_in_a_reply_costs_what_has_not_come(
    valkey_server: RedisServer, cut_at: int, whole: int
) -> None:
    async with cutting_proxy(valkey_server.port) as proxy, open_redis(proxy.url) as tier:
        assert await tier.store(1, 2, 3) == [Outcome.DONE] * 3
        proxy.left_bytes = cut_at
        wanted = [Outcome.DONE] * whole + [Outcome.FAILED] * (3 - whole)
        assert await tier.load(1, 2, 3) == wanted
        await tier.until(Connection.GONE)
        proxy.left_bytes = None
        await tier.until(Connection.UP)
        assert await tier.load(1, 2, 3) == [Outcome.DONE] * 3


async def test_a_block_expires(server: RedisServer) -> None:
    async with open_redis(server.url, ttl_s=3600) as tier:
        assert await tier.store(1) == [Outcome.DONE]
        assert 3000 <= server.ask("TTL", tier.name(1)) <= 3600
        assert tier.backend.traits.presence_ttl_s == 60
    async with open_redis(server.url, ttl_s=30) as tier:
        assert tier.backend.traits.presence_ttl_s == 30  # no longer than it is there


async def test_a_stray_cancellation_does_not_end_the_looking_after(
    valkey_server: RedisServer,
) -> None:
    """Some releases of Python cancel a task whose time ran out as it ended."""
    async with open_redis(valkey_server.url) as tier:
        await tier.until(Connection.UP)
        task = tier.backend._watch._task
        assert task is not None
        task.cancel()
        task.uncancel()
        valkey_server.kill()
        await tier.until(Connection.GONE)
        valkey_server.start()
        await tier.until(Connection.UP)
