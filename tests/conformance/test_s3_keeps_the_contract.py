"""The ``s3`` backend passes the shipped suite on a server that speaks S3.

On moto in ``make test``; with ``KVTIER_TEST_CEPH=1``, as in ``make test-long``, on Ceph too.
"""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING

import pytest

from kvtier.plugin_api.backend import Connection, Outcome
from kvtier.testing import BACKEND_CHECKS, PERSISTENCE_CHECKS, ServerFault, check_server_fault
from kvtier_backends.s3 import S3Backend
from kvtier_backends.shared import kept_connection
from tests.support.ceph_server import ceph_server
from tests.support.s3_server import BUCKET, client_for, moto_server, options_for, set_credentials
from tests.unit.backends.s3._s3 import open_s3

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvtier.plugin_api.backend import Backend, BackendContext
    from kvtier.testing import BackendCheck
    from kvtier.testing.server_faults import FaultyServer
    from tests.support.ceph_server import CephServer

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

SERVERS = ["moto", "ceph"] if os.environ.get("KVTIER_TEST_CEPH") else ["moto"]


@pytest.fixture(scope="module")
def ceph(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CephServer]:
    set_credentials()
    with ceph_server(tmp_path_factory.mktemp("ceph") / "cluster") as server:
        yield server


@pytest.fixture(scope="module", params=SERVERS)
def endpoint(request: pytest.FixtureRequest) -> Iterator[str]:
    set_credentials()
    if request.param == "ceph":
        yield request.getfixturevalue("ceph").endpoint
        return
    with moto_server() as server:
        yield server.endpoint


def s3(endpoint: str, prefix: str, context: BackendContext) -> Backend:
    return S3Backend.from_options(options_for(endpoint, prefix), context)


@pytest.mark.parametrize(
    "check", BACKEND_CHECKS + PERSISTENCE_CHECKS, ids=lambda check: check.__name__
)
async def test_s3_keeps_the_contract(check: BackendCheck, endpoint: str) -> None:
    await check(partial(s3, endpoint, check.__name__))


class EmptiedGateway:
    """A gateway that comes back with an empty bucket: nothing is asked of it in between."""

    def __init__(self, ceph: CephServer) -> None:
        self._endpoint = ceph.endpoint
        self.start = ceph.gateway.start
        self.stop = ceph.gateway.stop
        self.go_on = ceph.gateway.go_on
        self._end = ceph.gateway.kill

    def kill(self) -> None:
        client = client_for(self._endpoint)
        for page in client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET):
            for each in page.get("Contents", ()):
                client.delete_object(Bucket=BUCKET, Key=each["Key"])
        self._end()


if "ceph" in SERVERS:

    @pytest.mark.parametrize("fault", ServerFault)
    async def test_s3_survives_the_faults_of_a_gateway(
        fault: ServerFault, ceph: CephServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(kept_connection, "PAUSE_S_MIN", 0.01)
        monkeypatch.setattr(kept_connection, "PAUSE_S_MAX", 0.05)
        is_emptied = fault is ServerFault.EMPTIED
        server: FaultyServer = EmptiedGateway(ceph) if is_emptied else ceph.gateway
        await check_server_fault(partial(s3, ceph.endpoint, fault.name), server, fault)

    async def test_a_gateway_that_is_stopped_or_killed_is_used_again_with_its_blocks(
        ceph: CephServer,
    ) -> None:
        async with open_s3(ceph.endpoint, "gateway", request_timeout_s=1.0) as tier:
            assert await tier.store(1, 2) == [Outcome.DONE] * 2
            assert await tier.store(1) == [Outcome.DONE]
            assert tier.count("stores_known") == 1  # Ceph enforces the condition of a put
            with ceph.gateway.stopped():
                assert await tier.load(1, 2) == [Outcome.FAILED] * 2
                await tier.until_state(Connection.GONE)
            await tier.until_state(Connection.UP)
            assert await tier.load(1, 2) == [Outcome.DONE] * 2
            ceph.gateway.kill()
            assert await tier.load(1) == [Outcome.FAILED]
            await tier.until_state(Connection.GONE)
            ceph.gateway.start()
            await tier.until_state(Connection.UP)
            assert await tier.load(1, 2) == [Outcome.DONE] * 2
