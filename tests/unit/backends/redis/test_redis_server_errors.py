"""What a server's errors are to a block and the tier; servers that refuse writes or move."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from structlog.testing import capture_logs

from kvtier.plugin_api.backend import Connection, LoadBlock, Outcome
from kvtier_backends.redis.resp import Command, Reply, ReplyKind
from kvtier_backends.redis.server_errors import SERVER_ERRORS
from tests.support.patience import looks, until_true
from tests.support.redis_servers import HOST, running
from tests.unit.backends.redis._cutting_proxy import cutting_proxy
from tests.unit.backends.redis._redis import key_of, make_redis, open_redis

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
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
}
"""By the word that an error begins with: what a load makes of the block, and what a store does."""


def test_each_error_of_the_table_is_looked_at() -> None:
    assert set(OUTCOMES) == {*SERVER_ERRORS, "TOMORROW"}


@pytest.mark.parametrize("word", OUTCOMES)
async def test_an_error_is_a_miss_or_a_fault_of_one_block(word: str) -> None:
    backend = make_redis("redis://127.0.0.1:1")
    block = LoadBlock(key_of(1), memoryview(bytearray(8)))
    fetch = backend._fetch(block)
    fetch.command.reply = Reply(ReplyKind.ERROR, f"{word} more of it")
    command = Command((b"",))
    command.reply = fetch.command.reply
    with capture_logs() as lines:
        (loaded,) = await backend._loaded([fetch], None)
        assert (loaded.outcome, backend._stored(command, None)) == OUTCOMES[word]
    told = " ".join(str(line["reason"]) for line in lines)
    remedy = SERVER_ERRORS[word].remedy if word in SERVER_ERRORS else ""
    assert remedy in told


# --- servers that refuse writes ---


@pytest.fixture
def writable_server(tmp_path: Path) -> Iterator[RedisServer]:
    """Give one that can be told where it saves its data."""
    with running("valkey", tmp_path / "server", "--enable-protected-configs", "yes") as server:
        yield server


def _of_no_replicas(server: RedisServer, _: Path) -> None:
    server.ask("CONFIG", "SET", "min-replicas-to-write", "1")


def _is_a_replica(server: RedisServer, _: Path) -> None:
    server.ask("REPLICAOF", HOST, 1)  # of none that answers; it serves what it has


def _is_full(server: RedisServer, _: Path) -> None:
    server.ask("CONFIG", "SET", "maxmemory", "1")


def _cannot_save(server: RedisServer, folder: Path) -> None:
    gone = folder / "gone"
    gone.mkdir()
    server.ask("CONFIG", "SET", "dir", str(gone))
    gone.rmdir()
    server.ask("CONFIG", "SET", "save", "3600 1")
    server.ask("BGSAVE")
    for _ in looks(lambda: server.ask("INFO", "persistence")):
        if server.ask("INFO", "persistence")["rdb_last_bgsave_status"] == "err":
            return


def _takes_writes(server: RedisServer) -> None:
    server.ask("REPLICAOF", "NO", "ONE")
    for name, value in (
        ("min-replicas-to-write", "0"),
        ("maxmemory", "0"),
        ("stop-writes-on-bgsave-error", "no"),
    ):
        server.ask("CONFIG", "SET", name, value)


@pytest.mark.parametrize(
    ("refuse", "remedy"),
    [
        (_of_no_replicas, "min-replicas-to-write"),
        (_is_a_replica, "is a replica"),
        (_is_full, "maxmemory-policy"),
        (_cannot_save, "stop-writes-on-bgsave-error"),
    ],
)
async def test_a_server_that_refuses_writes_serves_what_it_has(
    writable_server: RedisServer,
    tmp_path: Path,
    refuse: Callable[[RedisServer, Path], None],
    remedy: str,
) -> None:
    """A tier that connects then, too: the description is written where that is possible.

    The log says what is missing, and stores go on by themselves once it is there.
    """
    async with open_redis(writable_server.url) as tier:
        assert await tier.store(1) == [Outcome.DONE]
        writable_server.ask("DEL", tier.backend._description.name)
    refuse(writable_server, tmp_path)
    with capture_logs() as lines:
        async with open_redis(writable_server.url) as tier:
            await tier.until(Connection.UP)
            assert await tier.load(1) == [Outcome.DONE]
            assert await tier.store(2) in ([Outcome.FAILED], [Outcome.FULL])
            assert await tier.load(1) == [Outcome.DONE]
            _takes_writes(writable_server)
            assert await tier.store(2) == [Outcome.DONE]
    (told,) = [line for line in lines if line["event"].startswith("redis tier: fault")]
    assert remedy in told["reason"]


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


async def test_a_server_that_has_lost_its_master_is_asked_again_once_it_has_one(
    valkey_server: RedisServer,
) -> None:
    """``replica-serve-stale-data no``: it answers MASTERDOWN to all."""
    async with open_redis(valkey_server.url) as tier:
        assert await tier.store(1) == [Outcome.DONE]
        valkey_server.ask("CONFIG", "SET", "replica-serve-stale-data", "no")
        valkey_server.ask("REPLICAOF", HOST, 1)
        assert await tier.load(1) == [Outcome.FAILED]
        await tier.until(Connection.GONE)
        valkey_server.ask("REPLICAOF", "NO", "ONE")
        await tier.until(Connection.UP)
        assert await tier.load(1) == [Outcome.DONE]
