"""Servers of the tests' own, and neither long pauses between two tries to connect nor checks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvtier_backends.redis import servers
from kvtier_backends.shared import kept_connection
from tests.support.redis_servers import PROGRAMS, Cluster, Program, running

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.redis_servers import RedisServer


@pytest.fixture(autouse=True)
def _tries_again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_connection, "PAUSE_S_MIN", 0.01)
    monkeypatch.setattr(kept_connection, "PAUSE_S_MAX", 0.05)
    monkeypatch.setattr(servers, "CHECK_S", 1e6)  # what is noticed is noticed by a call, or at once


@pytest.fixture(
    scope="module",
    params=[
        # A cluster of either speaks the same protocol, and each takes seconds to form.
        pytest.param(each, marks=[] if each == "valkey" else pytest.mark.long)
        for each in PROGRAMS
    ],
)
def formed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """Give one for all tests of a file, since a cluster waits some seconds until it is one."""
    program: Program = request.param
    cluster = Cluster(program, tmp_path_factory.mktemp("cluster"))
    try:
        cluster.form()
        yield cluster
    finally:
        cluster.kill()


@pytest.fixture(params=PROGRAMS)
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RedisServer]:
    """Give a Valkey, then a Redis."""
    program: Program = request.param
    with running(program, tmp_path / "server") as server:
        yield server


@pytest.fixture
def valkey_server(tmp_path: Path) -> Iterator[RedisServer]:
    """Give a Valkey, where one of the two is enough."""
    with running("valkey", tmp_path / "server") as server:
        yield server
