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
async def test_what_others_plant_is_a_miss_and_another_key_opens_nothing(
    valkey_server: RedisServer, kind: str
) -> None:
    """Although its checksum fits."""
    planted = memoryview(data_of(7))
    block = StoreBlock(key_of(1), planted, block_digest(key_of(1), planted))
    payload, trailer = Records(CONTEXT).encode(block)
    url = valkey_server.url
    async with open_redis(url, **{kind: "OURS"}) as tier:
        assert await tier.store(1, 2) == [Outcome.DONE] * 2
        if kind == "encryption_key_env":
            assert data_of(2)[:64] not in valkey_server.ask("GET", tier.name(2))
        valkey_server.ask("SET", tier.name(1), bytes(payload) + trailer)
        assert await tier.load(1, 2) == [Outcome.DAMAGED, Outcome.DONE]
        assert tier.count("blocks_damaged") == 1
    async with open_redis(url, **{kind: "THEIRS"}) as theirs, open_redis(url) as plain:
        assert await theirs.load(2) == [Outcome.DAMAGED]
        assert theirs.count("unauthenticated") == 1
        assert await plain.load(2) == [Outcome.ABSENT]  # it has names of its own
        assert await plain.store(2) == [Outcome.DONE]
        assert await theirs.load(2) == [Outcome.DAMAGED]
