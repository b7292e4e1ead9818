"""Whole runtimes over one Valkey: two engines share blocks, and the server dies and comes back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.patience import PATIENCE_S
from tests.support.redis_servers import RedisServer
from tests.unit.runtime.test_runtime import KEYS, PATIENT, Runtime

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer("valkey", tmp_path / "server")
    try:
        yield server
    finally:
        server.kill()


@pytest.fixture
def engines(tmp_path: Path, server: RedisServer) -> Iterator[list[Runtime]]:
    """Give two, which were there before their server. Tiers have processes of their own."""
    patient = {**PATIENT, "connect_timeout_s": PATIENCE_S, "call_timeout_s": PATIENCE_S}
    tier = {"type": "redis", "url": server.url, **patient}
    engines = [Runtime(tmp_path, secondary_tiers=[tier]) for _ in range(2)]
    until_all_are(engines, "CONNECTING")
    server.start()
    until_all_are(engines, "UP")
    yield engines
    assert [engine.facade.close() for engine in engines] == [True, True]


def until_all_are(engines: list[Runtime], state: str) -> None:
    for engine in engines:

        def is_in(engine: Runtime = engine) -> bool:
            return engine.facade.statistics().tiers[0].connection == state

        engine.until(is_in)


def test_two_engines_share_the_blocks_of_a_server(engines: list[Runtime]) -> None:
    writer, reader = engines
    writer.store(KEYS[:3])
    assert reader.hits(KEYS, "r") == 3


def test_a_server_that_dies_costs_hits_and_no_request_waits(
    engines: list[Runtime], server: RedisServer
) -> None:
    writer, reader = engines
    writer.store(KEYS[:2])
    server.kill()
    until_all_are(engines, "GONE")
    reader.facade.on_request_started("r")
    assert reader.facade.lookup_prefix(KEYS[:2], "r") == 0  # at once
    reader.facade.on_request_finished("r")
    server.start()
    until_all_are(engines, "UP")
    assert reader.hits(KEYS[:2], "the server is empty") == 0
    reader.store(KEYS[2:])
    assert writer.hits(KEYS[2:], "stored since") == 2
