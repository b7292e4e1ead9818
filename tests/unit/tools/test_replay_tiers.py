"""One trace over every type of tier, on its real server: what it hits must not depend on the type.

A tier that has no time, as where its deadlines are of another clock than its own, misses what
others hit.
"""

from __future__ import annotations

import json
import re
import threading
from contextlib import contextmanager, nullcontext
from itertools import count
from typing import TYPE_CHECKING, Any

import pytest
from anyio import to_thread

from kvtier.engine.facade import SchedulerFacade
from kvtier.tools.cli.replaying import WRONG
from kvtier.tools.replay import session
from kvtier.tools.replay.player import Player
from kvtier.tools.replay.report import problems_in
from kvtier.tools.replay.session import replay
from kvtier_backends.memory import MemoryBackend
from tests.support import mooncake_server, redis_servers, s3_server
from tests.support.needs import needs
from tests.support.patience import PATIENCE_S
from tests.support.server_program import HOST, free_port
from tests.unit.tools.test_replay_cli import replay as replay_command
from tests.unit.tools.test_replay_cli import write_trace
from tests.unit.tools.test_replay_player import (
    BLOCK_BYTES,
    report_of,
    seen_prefixes,
    settings_of,
    trace_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

pytestmark = pytest.mark.slow

PROMPTS = [[100 * (n % 3) + block for block in range(2 + n // 3)] for n in range(24)]
"""Three conversations that grow, of more blocks in all than the primary tier has."""
DISTINCT = len({block for prompt in PROMPTS for block in prompt})
SLOTS = 12
SAME = 0.95  #: as good as the same: what is promoted, and when, is up to threads
CAPACITY = {"capacity_bytes": "64MiB"}


@contextmanager
def redis(folder: Path) -> Iterator[dict[str, Any]]:
    with redis_servers.running("valkey", folder) as server:
        yield {"url": server.url}


@contextmanager
def s3(_: Path) -> Iterator[dict[str, Any]]:
    s3_server.set_credentials()
    with s3_server.moto_server() as server:
        yield s3_server.options_for(server.endpoint, "replay")


@contextmanager
def mooncake(folder: Path) -> Iterator[dict[str, Any]]:
    with mooncake_server.running(folder) as cluster:
        yield {"master": cluster.address}


OPTIONS: dict[str, Callable[[Path], AbstractContextManager[dict[str, Any]]]] = {
    "memory": lambda _: nullcontext(CAPACITY),
    "fs": lambda folder: nullcontext({"root_dir": str(folder / "kv")}),
    "bounded fs": lambda folder: nullcontext({"root_dir": str(folder / "kv"), **CAPACITY}),
    "disk": lambda folder: nullcontext({"path": str(folder / "kv"), **CAPACITY}),
    "redis": redis,
    "s3": s3,
    "mooncake": mooncake,
}
THREADS = [
    pytest.param(kind, "thread", marks=needs("mooncake") if kind == "mooncake" else ())
    for kind in OPTIONS
]
PROCESSES = [(kind, "process") for kind in ("bounded fs", "redis", "s3")]


@pytest.mark.parametrize(("kind", "cell"), [*THREADS, *PROCESSES])
def test_a_replay_hits_and_stores_the_same_over_each_type_of_tier(
    kind: str, cell: str, tmp_path: Path
) -> None:
    with OPTIONS[kind](tmp_path) as options:
        tier = {"type": kind.rpartition(" ")[2], "isolation": cell, **options}
        report = report_of(replay(trace_of(PROMPTS), settings_of(tier, slots=SLOTS)))
    primary, secondary = report["tiers"]
    assert report["warnings"] == problems_in(report) == []
    assert report["requests"]["hit_blocks"] >= SAME * seen_prefixes(PROMPTS)
    assert secondary["hit_blocks"] > primary["hit_blocks"] > 0
    assert secondary["cascaded"]["bytes"] >= SAME * DISTINCT * BLOCK_BYTES


def test_a_replay_without_its_server_fails_and_says_so_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its table has no hit of the tier, which says nothing of the tier."""
    monkeypatch.setattr(session, "CONNECT_WAIT_S_MIN", 0.01)
    tier = {
        "type": "redis",
        "url": f"redis://{HOST}:{free_port()}",
        "startup_connect_timeout_s": 0.01,
    }
    trace = write_trace(tmp_path / "trace.jsonl")
    assert replay_command(trace, "--dram", "50%", "--tier", json.dumps(tier)) == WRONG
    printed = capsys.readouterr()
    first = printed.out.partition("\n")[0]
    assert first.startswith("Warning: 1:redis was bypassed or failed: ")
    assert "its server was not reached" in first
    assert "1:redis was not replayed" in printed.err


def test_a_replay_begins_once_its_tiers_are_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else what takes long to open, on a busy machine, looks like what hangs."""
    may_open, opened = threading.Event(), []
    looks = count(1)

    async def opens_late(_: MemoryBackend) -> None:
        await to_thread.run_sync(may_open.wait, PATIENCE_S)

    def look(facade: SchedulerFacade, real: Any = SchedulerFacade.get_finished) -> int:
        if next(looks) == 3:
            may_open.set()
        return int(real(facade))

    def begin(*given: Any) -> Player:
        opened.append(may_open.is_set())
        may_open.set()
        return Player(*given)

    monkeypatch.setattr(MemoryBackend, "open", opens_late)
    monkeypatch.setattr(SchedulerFacade, "get_finished", look)
    monkeypatch.setattr(session, "Player", begin)
    tier = {"type": "memory", **CAPACITY, "startup_connect_timeout_s": PATIENCE_S}
    replay(trace_of(PROMPTS), settings_of(tier))
    assert opened == [True]


def test_a_replay_that_is_stopped_while_it_waits_for_a_server_ends() -> None:
    tier = {
        "type": "redis",
        "url": f"redis://{HOST}:{free_port()}",
        "startup_connect_timeout_s": 3600,
    }
    stopped = replay(trace_of(PROMPTS), settings_of(tier), should_stop=lambda: True)
    report = report_of(stopped)
    assert report["partial"]
    assert problems_in(report) == []


def test_a_tier_that_fails_some_of_its_work_is_named_before_the_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run itself has not failed: an engine would have lost these hits, too."""
    tier = {"type": "memory", **CAPACITY, "faults": {"load": {"fail_every": 1}}}
    trace = write_trace(tmp_path / "trace.jsonl")
    report = tmp_path / "report.json"
    options = ("--dram", "25%", "--tier", json.dumps(tier), "--json", report)
    assert replay_command(trace, *options) == 0
    first = capsys.readouterr().out.partition("\n")[0]
    assert re.fullmatch(r"Warning: 1:memory was bypassed or failed: .*blocks failed: \d.*", first)
    assert json.loads(report.read_text())["warnings"] == [first.removeprefix("Warning: ")]


def test_a_tier_that_is_full_is_to_get_more_room_since_the_log_has_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tier = {"type": "memory", **CAPACITY, "faults": {"store": {"full": True}}}
    trace = write_trace(tmp_path / "trace.jsonl")
    assert replay_command(trace, "--dram", "25%", "--tier", json.dumps(tier)) == WRONG
    first = capsys.readouterr().out.partition("\n")[0]
    assert re.fullmatch(r"Warning: 1:memory .*: blocks refused as full: \d+. Give it.*", first)
