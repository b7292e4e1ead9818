"""Blocks that are signed or encrypted: what others plant on the server is a miss."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvtier.plugin_api.backend import Outcome, StoreBlock, block_digest
from kvtier_backends.shared.plain_records import Records
from tests.unit.backends.redis._redis import CONTEXT, data_of, key_of, open_redis

if TYPE_CHECKING:
    from tests.support.redis_servers import RedisServer

pytestmark = pytest.mark.anyio
KINDS = ("auth_key_env", "encryption_key_env")


@pytest.fixture(autouse=True)
def _keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OURS", "ab" * 32)
    monkeypatch.setenv("THEIRS", "cd" * 32)


@pytest.mark.parametrize("kind", KINDS)
async def test_what_others_plant_is_a_miss(valkey_server: RedisServer, kind: str) -> None:
    """Although its checksum fits."""
    planted = memoryview(data_of(7))
    block = StoreBlock(key_of(1), planted, block_digest(key_of(1), planted))
    payload, trailer = Records(CONTEXT).encode(block)
    async with open_redis(valkey_server.url, **{kind: "OURS"}) as tier:
        assert await tier.store(1, 2) == [Outcome.DONE] * 2
        valkey_server.ask("SET", tier.name(1), bytes(payload) + trailer)
        assert (await tier.load(1, 2))[1] is Outcome.DONE
        assert await tier.load(1) == [Outcome.DAMAGED]
        assert tier.count("blocks_damaged") == 2


@pytest.mark.parametrize("kind", KINDS)
async def test_another_key_opens_nothing(valkey_server: RedisServer, kind: str) -> None:
    async with open_redis(valkey_server.url, **{kind: "OURS"}) as ours:
        assert await ours.store(1) == [Outcome.DONE]
    async with open_redis(valkey_server.url, **{kind: "THEIRS"}) as theirs:
        assert await theirs.load(1) == [Outcome.DAMAGED]
        assert theirs.count("unauthenticated") == 1


async def test_the_server_sees_nothing_of_an_encrypted_block(valkey_server: RedisServer) -> None:
    async with open_redis(valkey_server.url, encryption_key_env="OURS") as tier:
        assert await tier.store(1) == [Outcome.DONE]
        kept = valkey_server.ask("GET", tier.name(1))
        assert data_of(1)[:64] not in kept
        assert await tier.load(1) == [Outcome.DONE]


async def test_engines_with_and_without_a_key_do_not_meet(valkey_server: RedisServer) -> None:
    async with open_redis(valkey_server.url) as plain:
        assert await plain.store(1) == [Outcome.DONE]
        async with open_redis(valkey_server.url, auth_key_env="OURS") as signed:
            assert await signed.load(1) == [Outcome.ABSENT]
