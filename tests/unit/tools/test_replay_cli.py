"""``kvtier replay`` as a person runs it. What it refuses is in ``golden/refused.txt``."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvtier.engine.facade import SchedulerFacade
from kvtier.tools.cli.exit_status import BAD_INPUT
from kvtier.tools.cli.main import main
from kvtier.tools.cli.replaying import WRONG
from tests.support.patience import PATIENCE_S, until
from tests.unit.tools._lying import make_memory_lie

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[3]


def write_trace(path: Path, *, requests: int = 12, apart_s: float = 5.0) -> Path:
    """Write two conversations that grow in turns, in the plain format."""
    with path.open("w") as file:
        for number in range(requests):
            blocks = [1000 * (number % 2) + block for block in range(number // 2 % 10 + 1)]
            line = {
                "time_s": number * apart_s,
                "tokens": len(blocks) * 16,
                "output_tokens": 4,
                "blocks": blocks,
            }
            file.write(json.dumps(line) + "\n")
    return path


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write_trace(tmp_path / "trace.jsonl")


def replay(trace: Path, *options: object) -> int:
    return main(["replay", str(trace), "--block-bytes", "4KiB", *map(str, options)])


def test_a_replay_prints_tables_and_writes_a_report(trace, tmp_path, capsys) -> None:
    """A page describes every key. Every option: ``tests/house/test_reference_pages.py``."""
    status = replay(
        trace,
        *("--dram", "50%", "--tier", f"fs:{tmp_path / 'tier'}"),
        *("--json", tmp_path / "report.json"),
    )
    printed = capsys.readouterr().out
    report = json.loads((tmp_path / "report.json").read_text())
    assert status == 0
    assert (report["format"], report["version"], report["partial"]) == ("kvtier-replay", 1, False)
    assert report["settings"]["slot_count"] == 6
    assert report["requests"]["hit_blocks"] == 30
    assert report["gpu"]["checked_blocks"] == 30
    for text in ("0:primary", "1:fs", "Time to first token", "wrong blocks", "prepare_store"):
        assert text in printed
    assert not (tmp_path / "tier").exists()
    page = (ROOT / "docs/reference/replay-report.md").read_text()
    primary, secondary = report["tiers"]
    parts = (report["requests"], report["settings"], report["time_s"], report["gpu"], primary)
    parts += (secondary, report["over_time"][0], report["first_token_s"], report["scheduler_s"])
    assert {key for part in (report, *parts) for key in part if f"`{key}`" not in page} == set()


def test_a_wrong_byte_makes_the_run_fail_and_says_where(trace, monkeypatch, capsys) -> None:
    """The negative control: a backend that harms a block and vouches for it."""
    make_memory_lie(monkeypatch, -1)
    status = replay(trace, "--dram", "16KiB", "--tier", "memory:1MiB")
    failed = capsys.readouterr().err
    assert status == WRONG
    assert "blocks held wrong bytes" in failed
    assert "from 1:memory, slot " in failed
    assert "from byte 4088 on" in failed


def test_a_tier_that_does_not_end_is_told(trace, tmp_path, monkeypatch, capsys) -> None:
    real = SchedulerFacade.close

    def hangs(facade: SchedulerFacade) -> bool:
        real(facade)
        return False

    monkeypatch.setattr(SchedulerFacade, "close", hangs)
    assert replay(trace, "--dram", "50%", "--json", tmp_path / "report.json") == 0
    assert "A tier did not end in time" in capsys.readouterr().err
    assert json.loads((tmp_path / "report.json").read_text())["tiers_closed"] is False


def test_two_tiers_may_come_from_a_configuration_of_vllms(trace, tmp_path, capsys) -> None:
    config = tmp_path / "config.json"
    config.write_text(
        json.dumps(
            {
                "spec_name": "KVTierOffloadingSpec",
                "cpu_bytes_to_use": 4 * 4096,
                "secondary_tiers": [
                    {"type": "memory", "capacity_bytes": 4 * 4096},
                    {"type": "fs", "root_dir": str(tmp_path / "tier")},
                ],
            }
        )
    )
    assert replay(trace, "--config", config, "--policy", "arc", "--verify", "head") == 0
    printed = capsys.readouterr().out
    assert "2:fs" in printed
    assert "(head)" in printed


@pytest.mark.parametrize(
    ("kind", "rest", "key"), [("fs", "", "root_dir"), ("disk", ":8MiB", "path")]
)
def test_a_folder_with_something_in_it_is_refused_and_stays(
    trace, tmp_path, capsys, kind, rest, key
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "precious").write_text("x")
    tier = f"{kind}:{tmp_path / 'mine'}{rest}"
    assert replay(trace, "--dram", "50%", "--tier", tier) == BAD_INPUT
    assert f"{key}='{tmp_path / 'mine'}' is not empty" in capsys.readouterr().err
    assert (tmp_path / "mine" / "precious").read_text() == "x"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_a_valid_partial_report_and_no_litter(tmp_path, number) -> None:
    """In the middle of a replay that would take minutes in real time."""
    trace = write_trace(tmp_path / "trace.jsonl", requests=2_000)
    work = tmp_path / "work"
    work.mkdir()
    program = "import sys\nfrom kvtier.tools.cli.main import main\nsys.exit(main(sys.argv[1:]))"
    options = ["--json", "report.json", "--speed", "50", "--block-bytes", "4KiB"]
    child = subprocess.Popen(
        [sys.executable, "-c", program, "replay", trace, "--dram=1MiB", "--tier=fs:tier", *options],
        cwd=work,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'backends'}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        until(lambda: any(work.rglob("*.kv")) or child.poll() is not None)
        child.send_signal(number)
        _, failed = child.communicate(timeout=PATIENCE_S)
    finally:
        child.kill()
        child.wait()
    assert child.returncode == 128 + number, failed
    report = json.loads((work / "report.json").read_text())
    assert report["partial"]
    assert report["requests"]["first_tokens"] > 0
    assert report["wrong_blocks"] == 0
    assert [path.name for path in work.iterdir()] == ["report.json"]


def test_a_disk_tiers_folder_is_removed_unless_it_is_to_be_kept(trace, tmp_path) -> None:
    given = ("--dram", "50%", "--tier", f"disk:{tmp_path / 'made' / 'kv'}:8MiB")
    assert replay(trace, *given) == 0
    assert list(tmp_path.iterdir()) == [trace]
    assert replay(trace, *given, "--keep") == 0
    assert (tmp_path / "made" / "kv" / "superblock").exists()
