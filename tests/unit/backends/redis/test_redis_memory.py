"""The memory of the servers, as the tier's capacity and use: asked seldom, and shown if known."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvtier.plugin_api.backend import Connection, Outcome
from kvtier_backends.redis import servers
from tests.support.patience import until_true
from tests.unit.backends.redis._redis import BLOCK_BYTES, open_redis
from tests.unit.backends.redis.test_redis_stores import RIGHTS, calls

if TYPE_CHECKING:
    from tests.support.redis_servers import Cluster, RedisServer

pytestmark = pytest.mark.anyio
LIMIT = 64 << 20


class Calls:
    """How often a server has run a command. To ask for that is a command, too: INFO."""

    def __init__(self, server: RedisServer) -> None:
        self._server = server
        self._own = 0

    def of(self, command: str) -> int:
        found = calls(self._server, command) - (self._own if command == "info" else 0)
        self._own += 1
        return found


async def test_the_servers_memory_is_shown_and_asked_with_a_check_and_not_with_a_call(
    server: RedisServer,
) -> None:
    server.ask("CONFIG", "SET", "maxmemory", LIMIT)
    asked = Calls(server)
    async with open_redis(server.url) as tier:
        await tier.until(Connection.UP)
        before = tier.count("used_bytes")
        assert tier.count("capacity_bytes") == LIMIT
        assert 0 < before < LIMIT
        for number in range(20):
            assert await tier.store(number) == [Outcome.DONE]
        assert asked.of("info") == 1
        tier.backend._watch._measure_from = 0.0
        tier.backend._watch.doubt()
        await until_true(lambda: tier.count("used_bytes") >= before + 20 * BLOCK_BYTES)
        checks = asked.of("get")
        tier.backend._watch.doubt()
        await until_true(lambda: asked.of("get") > checks)
        assert asked.of("info") == 2, "seldom, however often the servers are checked"


async def test_a_server_without_a_limit_has_no_capacity(server: RedisServer) -> None:
    async with open_redis(server.url) as tier:
        await tier.until(Connection.UP)
        assert tier.count("used_bytes") > 0
        assert "capacity_bytes" not in tier.backend.counters()


async def test_a_user_who_may_not_ask_is_served_and_asks_once(
    valkey_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "CHECK_S", 0.0)
    valkey_server.ask("ACL", "SETUSER", "kv", *RIGHTS)
    monkeypatch.setenv("PASSWORD", "secret")
    options = {"username": "kv", "password_env": "PASSWORD"}
    async with open_redis(valkey_server.url, **options) as tier:
        assert await tier.store(1) == [Outcome.DONE]
        asked = Calls(valkey_server)
        checks = asked.of("get")
        await until_true(lambda: asked.of("get") > checks + 2)
        assert asked.of("info") == 1
        assert not {"used_bytes", "capacity_bytes"} & set(tier.backend.counters())
        assert tier.is_in(Connection.UP)


async def test_the_nodes_of_a_cluster_are_added_up_if_all_of_them_have_a_limit(
    formed: Cluster,
) -> None:
    for node in formed.nodes:
        node.ask("CONFIG", "SET", "maxmemory", LIMIT)
    async with open_redis(formed.url, mode="cluster") as tier:
        await tier.until(Connection.UP)
        assert tier.count("capacity_bytes") == LIMIT * len(formed.nodes)
        assert tier.count("used_bytes") > 0
    formed.nodes[0].ask("CONFIG", "SET", "maxmemory", 0)
    async with open_redis(formed.url, mode="cluster") as tier:
        await tier.until(Connection.UP)
        assert "capacity_bytes" not in tier.backend.counters()
