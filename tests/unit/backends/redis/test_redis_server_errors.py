"""What a server's errors are to a block and the tier; a server that moves."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from structlog.testing import capture_logs

from kvtier.plugin_api.backend import Connection, LoadBlock, Outcome
from kvtier_backends.redis.resp import Command, Reply, ReplyKind
from kvtier_backends.redis.server_errors import SERVER_ERRORS
from tests.support.patience import until_true
from tests.support.redis_servers import HOST, running
from tests.unit.backends.redis._cutting_proxy import cutting_proxy
from tests.unit.backends.redis._redis import key_of, make_redis, open_redis

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.redis_servers import RedisServer

pytestmark = pytest.mark.anyio

ABSENT, DAMAGED, FAILED, FULL = Outcome.ABSENT, Outcome.DAMAGED, Outcome.FAILED, Outcome.FULL
OUTCOMES = {
    "OOM": (FAILED, FULL),
    "WRONGTYPE": (DAMAGED, FAILED),
    "MOVED": (ABSENT, FAILED),
    "ASK": (ABSENT, FAILED),
    "TRYAGAIN": (ABSENT, FAILED),
    **dict.fromkeys(("ERR", "READONLY", "MASTERDOWN", "LOADING"), (FAILED, FAILED)),
    **dict.fromkeys(("NOREPLICAS", "MISCONF", "NOPERM", "NOAUTH"), (FAILED, FAILED)),
    **dict.fromkeys(("BUSY", "CROSSSLOT", "CLUSTERDOWN", "TOMORROW"), (FAILED, FAILED)),
    "MAXCLIENTS": (FAILED, FAILED),
}
"""By an error's key in the table: what a load makes of the block, and what a store does."""


def test_each_error_of_the_table_is_looked_at() -> None:
    assert set(OUTCOMES) == {*SERVER_ERRORS, "TOMORROW"}


@pytest.mark.parametrize("word", OUTCOMES)
async def test_an_error_is_a_miss_or_a_fault_of_one_block(word: str) -> None:
    backend = make_redis("redis://127.0.0.1:1")
    block = LoadBlock(key_of(1), memoryview(bytearray(8)))
    fetch = backend._fetch(block)
    text = "ERR max number of clients reached" if word == "MAXCLIENTS" else f"{word} more of it"
    fetch.command.reply = Reply(ReplyKind.ERROR, text)
    command = Command((b"",))
    command.reply = fetch.command.reply
    with capture_logs() as lines:
        (loaded,) = await backend._loaded([fetch], None)
        assert (loaded.outcome, backend._stored(command, None)) == OUTCOMES[word]
    told = " ".join(str(line["reason"]) for line in lines)
    remedy = SERVER_ERRORS[word].remedy if word in SERVER_ERRORS else ""
    assert remedy in told


# --- servers that move ---


async def test_a_master_that_became_a_replica_is_left_for_the_one_that_its_name_leads_to(
    valkey_server: RedisServer, tmp_path: Path
) -> None:
    """It keeps its connections: 162 of 162 stores failed, and loads came from the old master."""
    with running("valkey", tmp_path / "next") as new:
        async with cutting_proxy(valkey_server.port) as name, open_redis(name.url) as tier:
            await tier.until(Connection.UP)
            await asyncio.gather(*(tier.store(number) for number in range(4)))
            name.leads_to = new.port
            valkey_server.ask("REPLICAOF", HOST, new.port)
            assert await tier.store(5) == [Outcome.FAILED]
            assert await tier.store(5) == [Outcome.DONE]
            assert await tier.load(5) == [Outcome.DONE]
            assert new.ask("EXISTS", tier.name(5)) == 1

            def clients() -> int:
                """Count the tier's connections to the old one: those of a batch, and the kept."""
                listed = valkey_server.ask("CLIENT", "LIST", "TYPE", "normal")
                return bytes(listed).count(b"\n") - 1  # the one that asks

            await until_true(lambda: clients() == 0, clients)
            assert tier.states == [Connection.CONNECTING, Connection.UP]
