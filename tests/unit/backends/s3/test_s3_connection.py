"""How the tier stands with its server: it comes up, notices a loss, and comes back by itself."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from structlog.testing import capture_logs

from kvtier.plugin_api.backend import Connection, Outcome
from kvtier_backends.shared.namespaces import namespace_name
from tests.support.s3_fault_server import Fault
from tests.support.s3_server import BUCKET, client_for
from tests.unit.backends.s3._s3 import CONTEXT, open_s3

if TYPE_CHECKING:
    from tests.support.s3_fault_server import FaultServer
    from tests.support.s3_server import MotoServer

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

CONNECTING, UP = Connection.CONNECTING, Connection.UP
DONE, ABSENT = Outcome.DONE, Outcome.ABSENT


def description_below(prefix: str) -> str:
    return f"{prefix}/{namespace_name(CONTEXT)}/description.json"


async def test_one_that_is_read_only_writes_nothing(moto: MotoServer) -> None:
    async with open_s3(moto.endpoint, "reads", replace(CONTEXT, read_only=True)) as s3:
        assert await s3.load(1) == [ABSENT]
    found = client_for(moto.endpoint).list_objects_v2(Bucket=BUCKET, Prefix="reads")
    assert found["KeyCount"] == 0


async def test_a_bucket_that_does_not_exist_is_named_once_and_used_once_it_does(
    shared_moto: MotoServer,
) -> None:
    with capture_logs() as logs:
        async with open_s3(shared_moto.endpoint, url="s3://not-yet/p", wait=False) as s3:
            await s3.until(lambda: len(logs) > 0)
            client_for(shared_moto.endpoint).create_bucket(Bucket="not-yet")
            await s3.until_state(UP)
    events = [(line["event"], line.get("reason")) for line in logs]
    assert events == [
        ("s3 tier: not connected, and not used until it is", "404 NoSuchBucket"),
        ("s3 tier: connected", None),
    ]
    assert "Create it" in logs[0]["remedy"]


async def test_the_description_says_in_plain_words_whose_blocks_these_are(
    shared_moto: MotoServer,
) -> None:
    client = client_for(shared_moto.endpoint)
    async with open_s3(shared_moto.endpoint, "described"):
        body = client.get_object(Bucket=BUCKET, Key=description_below("described"))["Body"].read()
    assert json.loads(body) == {
        "block_bytes": 65536,
        "facts": {"block_bytes": 65536, "dtype": "bf16", "model_name": "org/m"},
        "format": "kvtier s3",
        "format_version": 1,
    }


@pytest.mark.parametrize(
    ("there", "said"),
    [
        (
            b'{"format": "kvtier s3", "format_version": 1, "block_bytes": 4096, "facts": {}}',
            "block_bytes is 4096 there and 65536 here",
        ),
        (b"not json", "is no description"),
        (bytes((1 << 20) + 1), "is no description: an object of 1048577 bytes"),
    ],
)
async def test_the_blocks_of_others_are_refused_with_both_sides_named(
    shared_moto: MotoServer, there: bytes, said: str
) -> None:
    client, name = client_for(shared_moto.endpoint), description_below("others")
    client.put_object(Bucket=BUCKET, Key=name, Body=there)
    with capture_logs() as logs:
        async with open_s3(shared_moto.endpoint, "others", wait=False) as s3:
            await s3.until(lambda: len(logs) > 0)
            assert said in logs[0]["reason"]
            assert s3.states == [CONNECTING]
            kept = client.get_object(Bucket=BUCKET, Key=name)["Body"].read()
            assert kept == there
            client.delete_object(Bucket=BUCKET, Key=name)
            await s3.until_state(UP)


async def test_one_request_that_fails_ends_no_connection(
    faulty: tuple[FaultServer, str],
) -> None:
    server, endpoint = faulty
    async with open_s3(endpoint) as s3:
        await s3.store(1)
        before = len(server.requests)
        server.misbehave(Fault.RESET, "GET", times=1)
        assert await s3.load(1) == [DONE]
        await s3.until(lambda: any("description" in path for _, path in server.requests[before:]))
        assert s3.states == [CONNECTING, UP]
