"""``kvtier ls`` and ``purge`` on the bucket of an ``s3`` tier, which an engine is using."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from kvtier.core.generations import Generations, marked
from kvtier.plugin_api.backend import Namespace, Outcome
from kvtier.tools.cli import purge
from kvtier_backends.s3 import client as s3_client
from kvtier_backends.shared.namespaces import namespace_name
from tests.support.s3_server import BUCKET, client_for, moto_server, options_for, set_credentials
from tests.unit.backends.s3._s3 import BLOCK_BYTES, CONTEXT, open_s3
from tests.unit.tools._shell import blocks_in

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.s3_server import MotoServer
    from tests.unit.tools._shell import Shell

pytestmark = pytest.mark.anyio
OTHER = replace(CONTEXT, namespace=Namespace({"model_name": "org/m", "dtype": "fp8"}))
NAMES = [namespace_name(context) for context in (CONTEXT, OTHER)]
DAY_S = 86_400
NOT_OURS = (
    "p/readme",
    "p/my_model/description.json",
    f"p/{NAMES[0]}/abc/no hex",
    f"p/{NAMES[0]}/abc/abd0",
    f"p/{NAMES[0]}/abc/abc0/more",
    f"pp/{NAMES[0]}/abc/abc0",
)


@pytest.fixture(scope="module")
def server() -> Iterator[MotoServer]:
    set_credentials()
    with moto_server() as server:
        yield server


@pytest.fixture
async def stored(server: MotoServer, monkeypatch: pytest.MonkeyPatch) -> str:
    """Blocks of two namespaces, what is none of a tier's, and listings of several pages."""
    set_credentials()
    monkeypatch.setattr(s3_client, "LISTED_AT_ONCE", 3)
    for context, blocks in ((CONTEXT, 7), (OTHER, 3)):
        async with open_s3(server.endpoint, "p", context) as tier:
            assert await tier.store(*range(blocks)) == [Outcome.DONE] * blocks
    for name in NOT_OURS:
        client_for(server.endpoint).put_object(Bucket=BUCKET, Key=name, Body=b"x")
    return json.dumps({"type": "s3", **options_for(server.endpoint, "p")})


def names_in(server: MotoServer) -> set[str]:
    found = client_for(server.endpoint).list_objects_v2(Bucket=BUCKET)["Contents"]
    return {each["Key"] for each in found}


async def test_ls_shows_namespaces_blocks_bytes_ages_and_why_they_differ(
    stored: str, kvtier: Shell
) -> None:
    figures = await kvtier("ls", stored)
    assert blocks_in(figures) == {NAMES[0]: 7, NAMES[1]: 3}
    assert figures["bytes"] == 10 * BLOCK_BYTES
    facts = {row["namespace"]: row["facts"] for row in figures["namespaces"]}
    assert facts == {NAMES[0]: CONTEXT.namespace.facts, NAMES[1]: OTHER.namespace.facts}
    assert all(row["oldest_s"] <= row["newest_s"] for row in figures["namespaces"])
    shown = await kvtier.shown("ls", stored)
    assert "oldest" in shown
    assert "fp8" in shown.partition("What separates them")[2]


async def test_purge_removes_one_namespace_and_leaves_what_is_not_its_own(
    server: MotoServer, stored: str, kvtier: Shell
) -> None:
    digest = NAMES[1].rpartition("_")[2]
    would = await kvtier("purge", stored, "--namespace", digest[:5], "--dry-run")
    assert blocks_in(would) == {NAMES[1]: 3}
    assert len(blocks_in(await kvtier("ls", stored))) == 2
    assert blocks_in(await kvtier("purge", stored, "--namespace", digest[:5])) == {NAMES[1]: 3}
    assert blocks_in(await kvtier("ls", stored)) == {NAMES[0]: 7}
    async with open_s3(server.endpoint) as tier:
        assert await tier.load(0) == [Outcome.DONE]
        assert (await kvtier("purge", stored, "--all"))["blocks"] == 7
        assert await tier.load(0) == [Outcome.ABSENT]
    assert names_in(server) == {*NOT_OURS}


async def test_blocks_of_weights_without_a_name_are_shown_and_purged_by_themselves(
    server: MotoServer, stored: str, kvtier: Shell
) -> None:
    """The description of the namespace stays, too."""
    mark = Generations().begin(None)
    assert mark is not None
    (key,) = marked((bytes(36),), mark)
    name = f"p/{NAMES[0]}/{key.hex()[:3]}/{key.hex()}"
    client_for(server.endpoint).put_object(Bucket=BUCKET, Key=name, Body=b"x")
    rows = {row["namespace"]: row for row in (await kvtier("ls", stored))["namespaces"]}
    assert [rows[each]["dead_blocks"] for each in NAMES] == [1, 0]
    assert blocks_in(await kvtier("purge", stored, "--dead")) == {NAMES[0]: 1}
    figures = await kvtier("ls", stored)
    assert blocks_in(figures) == {NAMES[0]: 7, NAMES[1]: 3}
    assert all(row["facts"] for row in figures["namespaces"])


async def test_purge_by_age_removes_what_was_stored_longer_ago_and_no_description(
    server: MotoServer, stored: str, kvtier: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (await kvtier("purge", stored, "--older-than", "7d"))["blocks"] == 0
    before = names_in(server)

    class LaterClock:
        """Of the command alone: what was stored just now is eight days old."""

        time = staticmethod(lambda: time.time() + 8 * DAY_S)

    monkeypatch.setattr(purge, "time", LaterClock)
    assert (await kvtier("purge", stored, "--older-than", "9d"))["blocks"] == 0
    gone = await kvtier("purge", stored, "--older-than", "7d", "--namespace", NAMES[0])
    assert blocks_in(gone) == {NAMES[0]: 7}
    left = before - names_in(server)
    assert len(left) == 7
    assert all(name.startswith(f"p/{NAMES[0]}/") for name in left)
    assert f"p/{NAMES[0]}/description.json" in names_in(server)


async def test_what_cannot_be_done_is_refused(stored: str, kvtier: Shell) -> None:
    entry: dict[str, Any] = json.loads(stored)
    assert "names none" in await kvtier.refused("purge", stored, "--namespace", "zz")
    no_bucket = json.dumps({**entry, "url": "s3://no-such-bucket/p"})
    assert "NoSuchBucket" in await kvtier.refused("ls", no_bucket)
    assert "credential" in await kvtier.refused("ls", "s3://me:secret@bucket/p")
    assert "no tier that can be listed" in await kvtier.refused("ls", '{"type": "mooncake"}')
