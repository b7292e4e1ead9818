"""A call's small blocks are stored by one command, where that is possible."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kvtier.plugin_api.backend import Outcome
from kvtier_backends.redis import backend
from tests.unit.backends.redis._redis import CONTEXT, open_redis

if TYPE_CHECKING:
    from tests.support.redis_servers import RedisServer

pytestmark = pytest.mark.anyio
RIGHTS = ("on", ">secret", "~kvtier:*", "+get", "+set", "+exists", "+unlink")


def calls(server: RedisServer, command: str) -> int:
    """Return how often the server has run a command, or has been asked to in vain."""
    found: dict[str, Any] = server.ask("INFO", "commandstats").get(f"cmdstat_{command}", {})
    return int(found.get("calls", 0)) + int(found.get("rejected_calls", 0))


async def test_blocks_of_a_call_are_stored_by_one_command(valkey_server: RedisServer) -> None:
    async with open_redis(valkey_server.url) as tier:
        assert await tier.store(1, 2, 3) == [Outcome.DONE] * 3
        assert await tier.load(3, 1, 2) == [Outcome.DONE] * 3
        assert await tier.backend.store([]) == []
    assert calls(valkey_server, "mset") == 1


@pytest.mark.parametrize("reason", ["ttl_s", "large"])
async def test_blocks_that_expire_or_are_large_take_a_command_each(
    valkey_server: RedisServer, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reason == "large":
        monkeypatch.setattr(backend, "MSET_BLOCK_BYTES_MAX", CONTEXT.block_bytes - 1)
    options = {"ttl_s": 3600} if reason == "ttl_s" else {}
    async with open_redis(valkey_server.url, **options) as tier:
        assert await tier.store(1, 2, 3) == [Outcome.DONE] * 3
        assert await tier.load(3, 1, 2) == [Outcome.DONE] * 3
        expires = valkey_server.ask("TTL", tier.name(1)) > 0
        assert expires is (reason == "ttl_s")
    assert calls(valkey_server, "mset") == 0


async def test_a_user_without_the_right_to_it_asks_once(
    valkey_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    valkey_server.ask("ACL", "SETUSER", "kv", *RIGHTS)
    monkeypatch.setenv("PASSWORD", "secret")
    options = {"username": "kv", "password_env": "PASSWORD"}
    async with open_redis(valkey_server.url, **options) as tier:
        assert await tier.store(1, 2) == [Outcome.DONE] * 2
        assert await tier.store(3) == [Outcome.DONE]
        assert await tier.load(1, 2, 3) == [Outcome.DONE] * 3
        assert tier.count("stores_failed") == 0
    assert calls(valkey_server, "mset") == 1
