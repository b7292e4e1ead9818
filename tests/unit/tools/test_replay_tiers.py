"""Replays over every type of tier: the same trace finds the same blocks, wherever they are kept."""

from __future__ import annotations

from contextlib import contextmanager
from itertools import product
from typing import TYPE_CHECKING, Any

import pytest

from kvtier.tools.replay import session
from kvtier.tools.replay.report import bypassed_in
from kvtier.tools.replay.session import replay
from tests.support import mooncake_server, redis_servers, s3_server
from tests.support.patience import PATIENCE_S
from tests.support.patient_limits import TIER_LIMITS
from tests.unit.tools.test_replay_player import report_of, settings_of, trace_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.slow

PATIENT = dict.fromkeys(TIER_LIMITS, PATIENCE_S)
SLOTS = 8
PROMPTS = [list(range(10 * (number % 6), 10 * (number % 6) + 5)) for number in range(24)]
"""Six prompts of five blocks, four times each, an hour apart: DRAM has room for one of them."""
BLOCKS = 30
HITS = BLOCKS * 3
CAPACITY = "4MiB"


@contextmanager
def options_of(kind: str, folder: Path) -> Iterator[dict[str, Any]]:
    """Give a tier's entry, with its server, if it needs one, while that runs."""
    if kind == "memory":
        yield {"type": "memory", "capacity_bytes": CAPACITY}
    elif kind == "disk":
        yield {"type": "disk", "path": str(folder / "disk"), "capacity_bytes": "64MiB"}
    elif kind == "fs":
        yield {"type": "fs", "root_dir": str(folder / "fs")}
    elif kind == "bounded fs":
        yield {"type": "fs", "root_dir": str(folder / "fs"), "capacity_bytes": CAPACITY}
    elif kind == "redis":
        with redis_servers.running("valkey", folder / "server") as server:
            yield {"type": "redis", "url": server.url}
    elif kind == "s3":
        s3_server.set_credentials()
        with s3_server.moto_server() as server:
            yield {"type": "s3", **s3_server.options_for(server.endpoint, "replay")}
    else:
        with mooncake_server.running(folder) as cluster:
            yield {"type": "mooncake", "master": cluster.address}


KINDS = ["disk", "fs", "bounded fs", "redis", "s3", "mooncake"]


@pytest.mark.parametrize(
    ("kind", "cell"),
    [
        *product(("memory", *KINDS), ["thread"]),
        ("redis", "process"),
        *(
            pytest.param(each, "process", marks=pytest.mark.long)
            for each in KINDS
            if each != "redis"
        ),
    ],
)
def test_each_type_of_tier_stores_all_and_finds_all(kind: str, cell: str, tmp_path: Path) -> None:
    """A tier that goes by the time that is left has that of the machine, not of the replay."""
    with options_of(kind, tmp_path) as options:
        tier = {**PATIENT, **options, "cell": cell}
        replayed = replay(trace_of(PROMPTS, apart_s=3600.0), settings_of(tier, slots=SLOTS))
    report = report_of(replayed)
    _, found = report["tiers"]
    assert bypassed_in(report) == []
    assert found["cascaded"]["bytes"] == BLOCKS * report["settings"]["block_bytes"]
    assert found["hit_blocks"] == HITS


def test_a_report_says_first_that_a_tier_was_of_no_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table of misses would be taken for what the tier can do."""
    monkeypatch.setattr(session, "CONNECT_WAIT_S", 0.0)
    with redis_servers.running("valkey", tmp_path / "server", "--maxmemory", "1") as server:
        full = {**PATIENT, "type": "redis", "url": server.url, "connect_wait_s": PATIENCE_S}
        report = report_of(replay(trace_of(PROMPTS[:2]), settings_of(full, slots=SLOTS)))
    (line,) = bypassed_in(report)
    assert line.startswith("1:redis failed, was full or was bypassed")
    gone = {**PATIENT, "type": "redis", "url": server.url, "connect_wait_s": 0.001}
    report = report_of(replay(trace_of(PROMPTS[:2]), settings_of(gone, slots=SLOTS)))
    (line,) = bypassed_in(report)
    assert "its server is CONNECTING" in line
