"""The lines of tiers that can be used and of a closed runtime; where commands put theirs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest
from structlog.testing import capture_logs

from kvtier.core import backend_counts
from kvtier.hosts import process_host, thread_host
from kvtier.hosts.process_host import TierProcess
from kvtier.plugin_api.backend import Namespace
from kvtier.plugin_api.slot_memory import SlotMemory
from kvtier.runtime import open_runtime
from kvtier.settings.runtime_config import RuntimeConfig
from kvtier_backends.memory import MemoryBackend
from tests.support.patience import PATIENCE_S, until

if TYPE_CHECKING:
    from collections.abc import Iterator, MutableMapping
    from pathlib import Path

    from kvtier.engine.facade import SchedulerFacade

BLOCK = 8192
SLOTS = 8
CAPACITY_BYTES = 4 << 20
KEYS = [bytes([number]) * 36 for number in range(3)]

every_cell = pytest.mark.parametrize("cell", ["thread", "process"])

Lines = list["MutableMapping[str, Any]"]


@pytest.fixture
def lines() -> Iterator[Lines]:
    with capture_logs() as captured:
        yield captured


@pytest.fixture(autouse=True)
def _quick_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (thread_host, process_host):
        monkeypatch.setattr(module, "RESTART_PAUSE_S", 0.001)


def named(lines: Lines, event: str) -> Lines:
    return [line for line in lines if line["event"] == event]


def wait_for(lines: Lines, event: str, count: int = 1) -> Lines:
    """Wait for lines, and give nobody a call: the engine is idle."""
    until(lambda: len(named(lines, event)) >= count, lambda: lines)
    return named(lines, event)


def disk(path: Path, cell: str, **others: Any) -> dict[str, Any]:
    return {
        "type": "disk",
        "path": str(path),
        "capacity_bytes": CAPACITY_BYTES,
        "isolation": cell,
        "promote_timeout_s": PATIENCE_S,
        "store_timeout_s": PATIENCE_S,
        **others,
    }


def start(*tiers: dict[str, Any], close_timeout_s: float = PATIENCE_S) -> SchedulerFacade:
    config = RuntimeConfig.from_mapping(
        {"secondary_tiers": list(tiers), "close_timeout_s": close_timeout_s},
        slot_count=SLOTS,
        block_bytes=BLOCK,
    )
    return open_runtime(config, SlotMemory.anonymous(SLOTS, BLOCK), Namespace({"model": "m"}))


def give(facade: SchedulerFacade, blocks: int = len(KEYS), named: str = "") -> None:
    """Have blocks stored, and wait for no tier."""
    keys = [f"{named}{number}".encode().ljust(36) for number in range(blocks)] if named else KEYS
    facade.on_request_started(named)
    grant = facade.prepare_store(keys, named)
    assert grant is not None
    facade.complete_store(grant.keys, named)
    facade.on_request_finished(named)


def store(facade: SchedulerFacade) -> None:
    give(facade)
    until(lambda: facade.step_end() or facade.get_finished() == 0)


@every_cell
def test_a_tier_says_what_it_is_where_what_is_in_it_and_how_long_it_took(
    tmp_path: Path, cell: str, lines: Lines
) -> None:
    """Also while nobody calls: an engine that has just started is idle."""
    for blocks in (0, len(KEYS)):
        lines.clear()
        facade = start(disk(tmp_path / "kv", cell))
        try:
            (line,) = wait_for(lines, "tier is open")
            assert line["log_level"] == "info"
            assert line["tier"] == "1:disk"
            assert line["isolation"] == cell
            assert line["place"] == str(tmp_path / "kv")
            assert line["blocks"] == blocks
            assert line["capacity_blocks"] >= 5
            assert 0 < line["seconds"] < PATIENCE_S
            if not blocks:
                store(facade)
        finally:
            assert facade.close()
        assert len(named(lines, "tier is open")) == 1


@every_cell
def test_what_a_backend_logs_while_it_is_made_is_in_the_engines_log(
    tmp_path: Path, cell: str, lines: Lines, capfd: pytest.CaptureFixture[str]
) -> None:
    """A tier's process wrote it to its stdout, which is the engine's, and vLLM's log lacked it."""
    facade = start({"type": "fs", "root_dir": str(tmp_path / "kv"), "isolation": cell})
    wait_for(lines, "tier is open")
    assert facade.close()
    (line,) = (each for each in lines if "3 to 10 times as fast" in each["event"])
    assert (line["tier"], line["block_bytes"], line["log_level"]) == ("1:fs", BLOCK, "info")
    assert capfd.readouterr().out == ""


@every_cell
def test_a_runtime_that_is_closed_says_what_tiers_have_stored_meanwhile(
    tmp_path: Path, cell: str, lines: Lines
) -> None:
    facade = start(disk(tmp_path / "kv", cell))
    wait_for(lines, "tier is open")
    store(facade)
    assert facade.close()
    facade = start(disk(tmp_path / "other", cell))
    wait_for(lines, "tier is open", 2)
    give(facade)
    assert facade.close()
    assert facade.close()
    before, during = named(lines, "kvtier is closed")
    assert (before["stored_blocks"], before["lost_blocks"]) == (0, 0), "nothing was left to do"
    assert (during["stored_blocks"], during["lost_blocks"]) == (len(KEYS), 0)
    assert "lost" not in during
    assert during["log_level"] == "info"


def test_what_a_closed_runtime_has_not_stored_is_named_by_tier(lines: Lines) -> None:
    hangs = {"type": "memory", "capacity_bytes": 4 * BLOCK, "faults": {"store": {"hang": True}}}
    facade = start({"type": "memory", "capacity_bytes": 4 * BLOCK}, hangs, close_timeout_s=0.2)
    give(facade)
    until(lambda: facade.get_finished() == 1)
    facade.close()
    (line,) = named(lines, "kvtier is closed")
    assert (line["lost_blocks"], line["lost"]) == (len(KEYS), f"2:memory: {len(KEYS)}")


def test_each_tier_has_a_line_of_its_own(tmp_path: Path, lines: Lines) -> None:
    """A shared folder can't tell what is in it without a walk over it; it says where it is."""
    facade = start(
        {"type": "fs", "root_dir": str(tmp_path / "fs")},
        {"type": "memory", "capacity_bytes": 4 * BLOCK},
    )
    try:
        fs, memory = sorted(wait_for(lines, "tier is open", 2), key=lambda line: line["tier"])
        assert (fs["tier"], fs["place"]) == ("1:fs", str(tmp_path / "fs"))
        assert "blocks" not in fs
        assert (memory["tier"], memory["blocks"], memory["capacity_blocks"]) == ("2:memory", 0, 4)
        assert "place" not in memory
    finally:
        assert facade.close()


def test_a_tier_that_was_killed_says_so_once_and_what_is_in_it_when_it_is_back(
    tmp_path: Path, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what was lost: the blocks that left host memory before it was back."""
    may_return = threading.Event()
    real_restart = TierProcess._restart

    def restart(host: TierProcess) -> bool:
        may_return.wait(PATIENCE_S)
        return real_restart(host)

    monkeypatch.setattr(TierProcess, "_restart", restart)
    facade = start(disk(tmp_path / "kv", "process"))
    try:
        wait_for(lines, "tier is open")
        store(facade)
        host: Any = facade._tiers[0]
        os.kill(host._child.process.pid, signal.SIGKILL)
        until(lambda: facade.step_end() or facade.statistics().tiers[0].breaker == "DISABLED")
        give(facade, SLOTS, "lost")
        give(facade, SLOTS - 1, "found no room")
        may_return.set()
        (line,) = wait_for(lines, "tier is back")
        assert line["log_level"] == "info"
        assert (line["tier"], line["place"]) == ("1:disk", str(tmp_path / "kv"))
        assert line["blocks"] == len(KEYS)
        assert (line["blocks_not_loaded"], line["blocks_not_stored"]) == (0, SLOTS - 1)
        assert line["seconds"] >= 0
    finally:
        assert facade.close()
    assert len(named(lines, "tier is open")) == 1
    (fault,) = (line for line in lines if line["log_level"] != "info")
    assert fault["event"] == "tier disabled"
    assert fault["reason"].startswith("was killed by signal 9, as the kernel does when memory runs")
    assert "cpu_bytes_to_use" in fault["reason"], "what a limit is compared with"
    assert fault["remedy"].startswith("kvtier restarts the tier by itself")


def test_a_backend_that_hangs_when_it_is_asked_what_it_has_serves_all_the_same(
    lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()

    def counters(_: MemoryBackend) -> dict[str, int]:
        go_on.wait(PATIENCE_S)
        return {"blocks": 7}

    monkeypatch.setattr(MemoryBackend, "counters", counters)
    monkeypatch.setattr(backend_counts, "FIRST_WAIT_S", 0.01)
    facade = start({"type": "memory", "capacity_bytes": 4 * BLOCK, "isolation": "thread"})
    try:
        (line,) = wait_for(lines, "tier is open")
        assert "blocks" not in line
        store(facade)
        (tier,) = facade.statistics().tiers
        assert tier.counts.cascade_jobs > 0
    finally:
        go_on.set()
        assert facade.close()


COMMANDS_WITH_A_TIER = """
import json, sys
from kvtier.tools.cli import main as entry
from kvtier.tools.cli import check

def run(file: str, /) -> int:
    import structlog
    from kvtier.plugin_api.log import log
    log.warning("of kvtier", tier="1:x")
    structlog.get_logger("theirs").warning("of a backend")
    log.info("that it is open")
    print("{}")
    return 0

check.check = run
sys.exit(entry.main(["check", "any.json"]))
"""


def test_what_a_command_logs_goes_to_stderr_and_only_what_went_wrong() -> None:
    """Its stdout is its answer, which a program may read."""
    run = subprocess.run(
        [sys.executable, "-c", COMMANDS_WITH_A_TIER], capture_output=True, text=True, check=True
    )
    assert json.loads(run.stdout) == {}
    assert "of kvtier" in run.stderr
    assert "of a backend" in run.stderr
    assert "that it is open" not in run.stderr


def test_a_replay_with_a_tier_prints_its_report_and_nothing_else(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    row = {"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [1]}
    trace.write_text(json.dumps(row) + "\n")
    command = ["replay", str(trace), "--tier", f"disk:{tmp_path / 'kv'}:16MiB", "--dram", "1MiB"]
    run = subprocess.run(
        [sys.executable, "-m", "kvtier", *command], capture_output=True, text=True, check=True
    )
    assert "tier is open" not in run.stdout + run.stderr
    assert "[info" not in run.stdout
