"""``kvtier ls`` and ``purge`` on the servers of a ``redis`` tier, which an engine is using."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from kvtier.core.generations import Generations, marked
from kvtier.plugin_api.backend import Connection, Namespace, Outcome
from kvtier_backends.redis import offline
from kvtier_backends.shared.namespaces import namespace_name
from tests.support.redis_servers import running
from tests.unit.backends.redis._redis import BLOCK_BYTES, CONTEXT, open_redis
from tests.unit.tools._shell import Shell, blocks_in

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.redis_servers import RedisServer

pytestmark = pytest.mark.anyio
OTHER = replace(CONTEXT, namespace=Namespace({"model_name": "org/m", "dtype": "fp8"}))
BLOCKS = ((CONTEXT, 7), (OTHER, 3))
NAMES = [namespace_name(context) for context in (CONTEXT, OTHER)]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with running("valkey", tmp_path / "server", "--requirepass", "open sesame") as server:
        yield server


@pytest.fixture
def entry(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setenv("TEST_REDIS_PASSWORD", "open sesame")
    return {"type": "redis", "url": server.url, "password_env": "TEST_REDIS_PASSWORD"}


@pytest.fixture
async def stored(
    server: RedisServer, entry: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> dict[str, Any]:
    """Blocks of two namespaces, what is none of a tier's, and walks of several steps."""
    monkeypatch.setattr(offline, "NAMES_AT_ONCE", 3)
    for context, blocks in BLOCKS:
        async with open_redis(server.url, context, password_env=entry["password_env"]) as tier:
            await tier.until(Connection.UP)
            assert await tier.store(*range(blocks)) == [Outcome.DONE] * blocks
    for name in (
        "kvtier:theirs",
        "kvtier:a:b:00",
        "kvtier:m_1:no hex",
        "other:m_1:00",
        "kvtier::00",
    ):
        server.ask("SET", name, "x", password="open sesame")
    server.ask("RPUSH", f"kvtier:{NAMES[1]}:ff", "a list", password="open sesame")
    return entry


async def test_ls_shows_namespaces_blocks_bytes_and_why_they_differ(
    stored: dict[str, Any], kvtier: Shell
) -> None:
    figures = await kvtier("ls", json.dumps(stored))
    assert blocks_in(figures) == {NAMES[0]: 7, NAMES[1]: 3 + 1}, "something of nobody's, too"
    facts = {row["namespace"]: row["facts"] for row in figures["namespaces"]}
    assert facts == {NAMES[0]: CONTEXT.namespace.facts, NAMES[1]: OTHER.namespace.facts}
    assert 10 * BLOCK_BYTES < figures["bytes"] < 11 * BLOCK_BYTES
    shown = (await kvtier.shown("ls", json.dumps(stored))).partition("What separates them")[2]
    assert "fp8" in shown


async def test_purge_removes_one_namespace_and_leaves_what_is_not_its_own(
    server: RedisServer, stored: dict[str, Any], kvtier: Shell
) -> None:
    path, digest = json.dumps(stored), NAMES[1].rpartition("_")[2]
    would = await kvtier("purge", path, "--namespace", digest[:5], "--dry-run")
    assert blocks_in(would) == {NAMES[1]: 4}
    assert len(blocks_in(await kvtier("ls", path))) == 2
    assert blocks_in(await kvtier("purge", path, "--namespace", digest[:5])) == {NAMES[1]: 4}
    assert blocks_in(await kvtier("ls", path)) == {NAMES[0]: 7}
    async with open_redis(server.url, password_env=stored["password_env"]) as tier:
        await tier.until(Connection.UP)
        assert await tier.load(0) == [Outcome.DONE]
        assert (await kvtier("purge", path, "--all"))["blocks"] == 7
        assert await tier.load(0) == [Outcome.ABSENT]
    left = set(server.ask("KEYS", "*", password="open sesame"))
    assert left == {
        b"kvtier:theirs",
        b"kvtier:a:b:00",
        b"kvtier:m_1:no hex",
        b"other:m_1:00",
        b"kvtier::00",
    }


async def test_blocks_of_weights_without_a_name_are_shown_and_purged_by_themselves(
    server: RedisServer, stored: dict[str, Any], kvtier: Shell
) -> None:
    """The description of the namespace stays, too."""
    path, mark = json.dumps(stored), Generations().begin(None)
    assert mark is not None
    (key,) = marked((bytes(36),), mark)
    server.ask("SET", f"kvtier:{NAMES[0]}:{key.hex()}", "x", password="open sesame")
    rows = {row["namespace"]: row for row in (await kvtier("ls", path))["namespaces"]}
    assert [rows[name]["dead_blocks"] for name in NAMES] == [1, 0]
    assert blocks_in(await kvtier("purge", path, "--dead")) == {NAMES[0]: 1}
    figures = await kvtier("ls", path)
    assert blocks_in(figures) == {NAMES[0]: 7, NAMES[1]: 4}
    assert all(row["facts"] for row in figures["namespaces"])


async def test_what_cannot_be_done_is_refused(stored: dict[str, Any], kvtier: Shell) -> None:
    path = json.dumps(stored)
    assert "ttl_s" in await kvtier.refused("purge", path, "--older-than", "7d")
    assert "names none" in await kvtier.refused("purge", path, "--namespace", "zz")
    assert "AuthenticationError" in await kvtier.refused("ls", stored["url"])
    assert "no JSON" in await kvtier.refused("ls", "{")
    assert "not recognized" in await kvtier.refused("ls", "ftp://bucket")
    assert "password" in await kvtier.refused("ls", "redis://me:secret@host")
    assert "can't be looked at" in await kvtier.refused("ls", "redis://127.0.0.1:1")
