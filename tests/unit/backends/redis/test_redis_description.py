"""A readable description lies beside the blocks; another one is refused with both sides named."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from structlog.testing import capture_logs

from kvtier.plugin_api.backend import BackendContext, Connection, Namespace, Outcome
from tests.support.patience import until_true
from tests.unit.backends.redis._redis import BLOCK_BYTES, CONTEXT, open_redis

if TYPE_CHECKING:
    from tests.support.redis_servers import RedisServer

pytestmark = pytest.mark.anyio


async def test_a_person_can_read_whose_blocks_these_are(valkey_server: RedisServer) -> None:
    async with open_redis(valkey_server.url, key_prefix="kv") as tier:
        assert await tier.store(1) == [Outcome.DONE]
        names = sorted(valkey_server.ask("KEYS", "*"))
    stems = {name.rpartition(b":")[0] for name in names}
    assert len(names) == 2
    (stem,) = stems
    assert stem.startswith(b"kv:org_m_")
    written = json.loads(valkey_server.ask("GET", stem + b":description"))
    assert written["facts"] == CONTEXT.namespace.facts
    assert written["block_bytes"] == BLOCK_BYTES


async def test_one_that_is_read_only_writes_none(valkey_server: RedisServer) -> None:
    reader = replace(CONTEXT, read_only=True)
    async with open_redis(valkey_server.url, reader, key_prefix="reads") as tier:
        await tier.until(Connection.UP)
        assert await tier.load(1) == [Outcome.ABSENT]
    assert valkey_server.ask("KEYS", "reads:*") == []


async def test_another_description_is_refused_with_both_sides_named(
    server: RedisServer,
) -> None:
    async with open_redis(server.url) as tier:
        await tier.until(Connection.UP)
        name = tier.backend._description.name
    other = json.loads(server.ask("GET", name))
    other["facts"]["dtype"] = "fp8"
    server.ask("SET", name, json.dumps(other))
    with capture_logs() as lines:
        async with open_redis(server.url) as tier:
            assert await tier.store(1) == [Outcome.FAILED]
            assert await tier.load(1) == [Outcome.FAILED]
            await until_true(lambda: tier.count("connects_failed") > 2)
            assert tier.states == [Connection.CONNECTING]
            said = [line["reason"] for line in lines if "reason" in line]
            assert "facts.dtype is 'fp8' there and 'bf16' here" in said[0]
            assert [line["event"].partition(":")[2] for line in lines].count(
                " not connected, and not used until it is"
            ) == 1
            server.ask("DEL", name)  # the remedy that the line names
            await tier.until(Connection.UP)
            assert await tier.store(1) == [Outcome.DONE]


@pytest.mark.parametrize("written", [b"", b"no json", b"[1]", b"\xff"])
async def test_what_is_no_description_is_refused(
    valkey_server: RedisServer, written: bytes
) -> None:
    async with open_redis(valkey_server.url) as tier:
        await tier.until(Connection.UP)
        valkey_server.ask("SET", tier.backend._description.name, written)
    async with open_redis(valkey_server.url) as tier:
        assert await tier.load(1) == [Outcome.FAILED]
        assert tier.states == [Connection.CONNECTING]


async def test_two_engines_share_blocks(server: RedisServer) -> None:
    async with open_redis(server.url) as one, open_redis(server.url) as two:
        assert await one.store(1, 2) == [Outcome.DONE] * 2
        assert await two.probe(1, 2, 3) == [True, True, False]
        assert await two.load(1, 2, 3) == [Outcome.DONE, Outcome.DONE, Outcome.ABSENT]


OTHER = BackendContext(BLOCK_BYTES, Namespace({"model_name": "org/other"}), "1:redis")


@pytest.mark.parametrize(
    ("context", "options"),
    [(OTHER, {}), (CONTEXT, {"db": 1}), (CONTEXT, {"key_prefix": "other"})],
)
async def test_models_databases_and_prefixes_keep_engines_apart(
    valkey_server: RedisServer, context: BackendContext, options: dict[str, Any]
) -> None:
    url = valkey_server.url
    async with open_redis(url) as one, open_redis(url, context, **options) as two:
        assert await one.store(1) == [Outcome.DONE]
        assert await two.load(1) == [Outcome.ABSENT]
        assert await two.store(1) == [Outcome.DONE]
        await two.backend.close()
        assert await one.load(1) == [Outcome.DONE]
