"""``kvtier bench tier``: what it compares and leaves. Never how fast anything is.

What it refuses is in ``golden/refused.txt``.
"""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest

from kvtier.errors import StoreFault
from kvtier.plugin_api.backend import BackendContext, LoadBlock, Loaded, Namespace
from kvtier.plugin_api.slot_memory import SlotMemory
from kvtier.settings.runtime_config import TierConfig
from kvtier.tools.bench import tier_sides
from kvtier.tools.bench.call_legs import KINDS, LOAD, STORE, CallLeg
from kvtier.tools.bench.tier import (
    COMPRESSED,
    ENCRYPTED,
    PLAIN,
    SIGNED,
    TierBenchOptions,
    TierLegs,
    measure,
)
from kvtier.tools.bench.tier_figures import figures
from kvtier.tools.bench.tier_sides import BackendSide, CallShape
from kvtier.tools.cli.exit_status import BAD_INPUT
from kvtier.tools.cli.main import main
from kvtier_backends.memory import MemoryBackend
from tests.support import mooncake_server, redis_servers, s3_server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

BLOCK_BYTES = 4096
REDIS_BLOCKS = 16 * 8  #: in each of the plain client's 8 calls at once


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[redis_servers.RedisServer]:
    with redis_servers.running("valkey", tmp_path_factory.mktemp("valkey")) as server:
        yield server


def run(tier: dict[str, Any], report: Path, blocks: int, *more: str) -> dict[str, Any]:
    """Run the command with one round, and return its report's only size."""
    status = main(
        [
            *("bench", "tier", "--tier", json.dumps(tier), "--rounds", "1"),
            *("--block-bytes", "4KiB", "--bytes", str(blocks * BLOCK_BYTES)),
            *("--json", str(report), *more),
        ]
    )
    assert status == 0
    (tier_report,) = json.loads(report.read_text())["tiers"]
    (size,) = tier_report["sizes"]
    assert size["block_bytes"] == BLOCK_BYTES
    return {each["kind"] + " " + each["side"]: each for each in size["figures"]}


def expect_figures(found: dict[str, Any], tier_sides: list[str], client: str, sides: int) -> None:
    """Each side has figures of stores and of loads, and one client of each kind is the best."""
    for kind in KINDS:
        of_kind = {name: each for name, each in found.items() if each["kind"] == kind}
        clients = [each for each in of_kind.values() if each["is_client"]]
        assert {f"{kind} {side}" for side in tier_sides} <= of_kind.keys()
        assert len(clients) == sides == len(of_kind) - len(tier_sides)
        assert all(each["side"].startswith(client) for each in clients)
        (best,) = (each for each in clients if each["is_best_client"])
        assert best["median_ratio"] == 1.0
        for each in of_kind.values():
            assert each["call_p99_ms"] >= each["call_p50_ms"] > 0
            assert each["median_mb_per_s"] > 0
            assert each["median_cpu_s_per_gb"] > 0


def test_redis_is_measured_plain_signed_and_encrypted_and_nothing_is_left(
    valkey: redis_servers.RedisServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tier = {"type": "redis", "url": valkey.url}
    found = run(tier, tmp_path / "report.json", REDIS_BLOCKS, "--protection")
    expect_figures(found, [PLAIN, SIGNED, ENCRYPTED], "valkey-py", 6)
    assert valkey.ask("DBSIZE") == 0
    shown = capsys.readouterr().out
    assert "4 KiB load: kvtier, encrypted" in shown
    assert "4 KiB store: valkey-py" in shown


def test_fs_is_measured_compressed_too_beside_bare_files_and_nothing_is_left(
    tmp_path: Path,
) -> None:
    root = tmp_path / "root"
    root.mkdir()
    tier = {"type": "fs", "root_dir": str(root), "n_read_threads": 2, "n_write_threads": 2}
    found = run(tier, tmp_path / "report.json", 16 * 8, "--compression")
    expect_figures(found, [PLAIN, COMPRESSED], "files", 3)
    assert found["load kvtier"]["calls_at_once"] == 2
    assert found["load kvtier"]["blocks_a_call"] == 16
    assert not list(root.iterdir())


def test_disk_is_measured_beside_the_bare_disk_and_nothing_is_left(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    tier = {"type": "disk", "path": str(root), "capacity_bytes": "1TB", "io_depth": 2}
    found = run(tier, tmp_path / "report.json", 512, "--protection")
    expect_figures(found, [PLAIN, ENCRYPTED], "one file", 3)
    assert not list(root.iterdir())


@pytest.mark.long  # the gate has that of redis
def test_s3_is_measured_beside_obstore_and_nothing_is_left(tmp_path: Path) -> None:
    s3_server.set_credentials()
    with s3_server.moto_server() as server:
        options = s3_server.options_for(server.endpoint, "blocks", requests_max=2)
        found = run({"type": "s3", **options}, tmp_path / "report.json", 16 * 8)
        expect_figures(found, [PLAIN], "obstore", 3)
        (tier,) = json.loads((tmp_path / "report.json").read_text())["tiers"]
        assert tier["sizes"][0]["prompt_requests"] == {
            "lookup": {"head": 500},
            "store": {"put": 500},
            "load": {"get": 500},
        }
        listed = s3_server.client_for(server.endpoint).list_objects_v2(Bucket=s3_server.BUCKET)
        assert listed["KeyCount"] == 0


@pytest.mark.long  # the gate has that of redis
def test_mooncake_is_measured_beside_its_client_and_nothing_is_left(tmp_path: Path) -> None:
    with mooncake_server.running(tmp_path) as cluster:
        tier = {"type": "mooncake", "master": cluster.address}
        found = run(tier, tmp_path / "report.json", 128 * 8)
        expect_figures(found, [PLAIN], "Mooncake", 3)
        with mooncake_server.other_client(cluster) as client:
            assert client.remove_by_regex(".*", True) == 0


def test_a_size_that_cannot_be_measured_takes_nothing_from_those_before_it(
    valkey: redis_servers.RedisServer, capsys: pytest.CaptureFixture[str]
) -> None:
    tier = json.dumps({"type": "redis", "url": valkey.url})
    sizes = ("--block-bytes", "4KiB,64KiB", "--bytes", str(REDIS_BLOCKS * BLOCK_BYTES))
    assert main(["bench", "tier", "--tier", tier, "--rounds", "1", *sizes]) == BAD_INPUT
    said = capsys.readouterr()
    assert "4 KiB load: kvtier" in said.out
    assert f"Give {REDIS_BLOCKS * 65536} or more" in said.err


def test_a_server_that_is_not_reached_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tier_sides, "CONNECT_S_MAX", 0.2)
    port = redis_servers.free_port()
    tier = json.dumps({"type": "redis", "url": f"redis://127.0.0.1:{port}"})
    assert main(["bench", "tier", "--tier", tier, "--bytes", "8MiB"]) == BAD_INPUT
    message = capsys.readouterr().err
    assert f"127.0.0.1:{port}" in message
    assert "Start the server" in message


def measure_redis(server: redis_servers.RedisServer, advance: Callable[[], None]) -> TierLegs:
    config = TierConfig.from_mapping(1, {"type": "redis", "url": server.url})
    options = TierBenchOptions(leg_bytes=REDIS_BLOCKS * BLOCK_BYTES, rounds=2, protection=False)
    return asyncio.run(measure(config, BLOCK_BYTES, options, advance))


def test_what_is_stored_is_removed_when_the_benchmark_is_interrupted(
    valkey: redis_servers.RedisServer,
) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure_redis(valkey, interrupt)
    assert valkey.ask("DBSIZE") == 0


def test_a_server_that_ends_meanwhile_ends_the_benchmark(tmp_path: Path) -> None:
    with (
        redis_servers.running("valkey", tmp_path / "server") as server,
        pytest.raises(StoreFault),
    ):
        measure_redis(server, server.kill)


class _Liar(MemoryBackend):
    """Says that it has brought a block, and has not."""

    async def load(self, blocks: Sequence[LoadBlock]) -> Sequence[Loaded]:
        loaded = await super().load(blocks)
        for block in blocks:
            block.buffer[0] ^= 1
        return loaded


def test_a_load_that_brings_other_bytes_counts_as_damaged() -> None:
    async def store_and_load() -> None:
        context = BackendContext(BLOCK_BYTES, Namespace({}), "1:memory")
        backend = _Liar.from_options({"capacity_bytes": 16 * BLOCK_BYTES}, context)
        side = BackendSide("liar", backend, SlotMemory.anonymous(2, BLOCK_BYTES), "token")
        await side.open()
        await side.call(STORE, 1, [0])
        side.prepare_load()
        with pytest.raises(StoreFault, match="DAMAGED"):
            await side.call(LOAD, 1, [0])
        await side.close()

    asyncio.run(store_and_load())


def test_the_ratio_is_to_the_client_with_the_best_median_in_the_same_round() -> None:
    seconds = {PLAIN: (2.0, 4.0, 1.0), "slow, 1 at once": (1.0, 9.0, 9.0)}
    seconds["best, 4 at once"] = (1.0, 2.0, 2.0)
    shapes = {kind: dict.fromkeys(seconds, CallShape(16, 4)) for kind in KINDS}
    measured = TierLegs(BLOCK_BYTES, 16, 0.9, shapes)
    for round_ in range(3):
        legs = {side: CallLeg(each[round_], 0.5, [each[round_]]) for side, each in seconds.items()}
        measured.rounds.append(dict.fromkeys(KINDS, legs))
    found = {each.side: each for each in figures(measured) if each.kind == LOAD}
    assert [side for side, each in found.items() if each.is_best_client] == ["best, 4 at once"]
    assert found[PLAIN].ratios == [0.5, 0.5, 2.0]
    assert found[PLAIN].median_ratio == 0.5
    assert found[PLAIN].holds is False
    assert found["best, 4 at once"].holds is None
    assert found[PLAIN].call_p99_ms == 4000.0
