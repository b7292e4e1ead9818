"""Sentinels name the master: the tier goes to the one that took over."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from kvtier.plugin_api.backend import Connection, Outcome
from tests.support.patience import until, until_true
from tests.support.redis_servers import HOST, PROGRAMS, Program, Sentinel, running
from tests.unit.backends.redis._redis import open_redis

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.redis_servers import RedisServer

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


class Watched(NamedTuple):
    master: RedisServer
    replica: RedisServer
    sentinel: Sentinel


@pytest.fixture(
    params=[
        pytest.param(each, marks=[] if each == "valkey" else pytest.mark.long)  # six seconds each
        for each in PROGRAMS
    ]
)
def watched(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Watched]:
    program: Program = request.param
    with ExitStack() as stack:
        master = stack.enter_context(running(program, tmp_path / "master"))
        replica = stack.enter_context(
            running(program, tmp_path / "replica", "--replicaof", f"{HOST} {master.port}")
        )
        until(lambda: master.ask("INFO", "replication")["connected_slaves"] == 1)
        sentinel = Sentinel(program, tmp_path / "sentinel", "kv", master)
        stack.callback(sentinel.kill)
        sentinel.start()
        until(lambda: b"num-slaves 1 " in b" ".join(sentinel.ask("SENTINEL", "MASTER", "kv")))
        yield Watched(master, replica, sentinel)


async def test_the_server_that_took_over_is_found(watched: Watched) -> None:
    options: dict[str, Any] = {"mode": "sentinel", "sentinel_master": "kv"}
    async with open_redis(watched.sentinel.url, **options) as tier:
        assert await tier.store(1) == [Outcome.DONE]
        until(lambda: watched.replica.ask("DBSIZE") == 2)
        watched.master.kill()
        watched.sentinel.look_soon()
        await tier.until(Connection.GONE)
        await tier.until(Connection.UP)
        assert await tier.load(1) == [Outcome.DONE]  # the replica had it
        assert await tier.store(2) == [Outcome.DONE]
        assert watched.replica.ask("EXISTS", tier.name(2)) == 1


async def test_a_master_that_the_sentinels_do_not_know_is_waited_for(watched: Watched) -> None:
    options: dict[str, Any] = {"mode": "sentinel", "sentinel_master": "other"}
    async with open_redis(watched.sentinel.url, **options) as tier:
        assert await tier.load(1) == [Outcome.FAILED]
        await until_true(lambda: tier.count("connects_failed") > 1)
        assert tier.states == [Connection.CONNECTING]


async def test_sentinels_that_want_a_login_get_it_if_told_so(
    valkey_server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default they get no password: they may be other people's."""
    monkeypatch.setenv("KV_PASSWORD", "hunter2")
    options: dict[str, Any] = {
        "mode": "sentinel",
        "sentinel_master": "kv",
        "password_env": "KV_PASSWORD",
    }
    lines = ("requirepass hunter2", "sentinel auth-pass kv hunter2")
    sentinel = Sentinel("valkey", tmp_path / "sentinel", "kv", valkey_server, *lines)
    valkey_server.ask("CONFIG", "SET", "requirepass", "hunter2")
    sentinel.start()
    try:
        async with open_redis(sentinel.url, **options) as tier:
            assert await tier.store(1) == [Outcome.FAILED]
        async with open_redis(sentinel.url, **options, sentinel_auth=True) as tier:
            assert await tier.store(1) == [Outcome.DONE]
    finally:
        sentinel.kill()
