"""What ``kvtier size`` promises: bytes, hits, a knee, and the numbers that engines take."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from kvtier.tools.cli.exit_status import BAD_INPUT, INTERRUPTED
from kvtier.tools.cli.main import main
from tests.unit.tools._interrupted import interrupt_replays

if TYPE_CHECKING:
    from pathlib import Path

MODEL = ["--layers", "32", "--kv-heads", "8", "--head-dim", "128", "--dtype", "bfloat16"]
BLOCK_BYTES = 16 * 128 * 1024


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Ten requests come again after ten others: half of the cache is enough."""
    path = tmp_path / "trace.jsonl"
    rows = []
    for second in range(200):
        blocks = list(range(second % 10 * 4, second % 10 * 4 + 4))
        if second % 4 == 3:
            blocks = [1000 + second]
        rows.append({"time_s": second, "tokens": 16 * len(blocks), "blocks": blocks})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_without_a_trace_it_says_what_tokens_take(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "report.json"
    options = ["--tiers", "dram=64GiB,disk=2TiB", "--tp", "4", "--json", str(report)]
    assert main(["size", *MODEL, *options]) == 0
    data = json.loads(report.read_text())
    assert data["bytes_per_token"] == 131_072
    assert data["bytes_per_token_per_rank"] == 32_768
    assert data["tokens_per_gib"] == 8192
    assert data["tokens_per_tier"] == {"dram": 524_288, "disk": 16_777_216}
    out = capsys.readouterr().out
    assert f"cpu_bytes_to_use={64 * 2**30}" in out
    assert "--hicache-size 18 (GB of 10^9 bytes, per rank) with --tp 4" in out


def test_a_config_says_the_same_as_its_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "hidden_size": 4096,
        "torch_dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["size", "--model", str(tmp_path)]) == 0
    assert "131,072" in capsys.readouterr().out


def test_with_a_trace_and_prices_it_recommends(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "report.json"
    options = ["--trace", str(trace), "--price", "dram=3,disk=0.1", "--tiers", "dram=20MiB"]
    assert main(["size", *MODEL, *options, "--json", str(report), "--policy", "lru"]) == 0
    data = json.loads(report.read_text())
    ratios = [point["hit_ratio"] for point in data["curve"]]
    assert ratios == sorted(ratios)
    assert data["curve"][-1]["blocks"] == data["trace"]["distinct_blocks"]
    assert all(point["bytes"] == point["blocks"] * BLOCK_BYTES for point in data["curve"])
    assert data["knee"] in data["curve"]
    dram, disk = data["recommended"]
    assert disk["blocks"] == data["knee"]["blocks"]
    assert 4 <= dram["blocks"] <= disk["blocks"]
    assert disk["price"] == pytest.approx(disk["bytes"] / 2**30 * 0.1)
    assert data["tiers"][0]["blocks"] == 10
    assert data["engines"]["vllm_cpu_bytes_to_use"] == dram["bytes"]
    assert "knee" in capsys.readouterr().out


def test_ctrl_c_shows_the_curve_so_far_and_recommends_nothing(
    trace: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    interrupt_replays(monkeypatch, "kvtier.tools.cli.sizing.replay", after=3)
    report = tmp_path / "report.json"
    options = ["--trace", str(trace), "--price", "dram=3", "--json", str(report)]
    assert main(["size", *MODEL, *options]) == INTERRUPTED
    data = json.loads(report.read_text())
    assert (data["complete"], data["knee"], len(data["curve"])) == (False, None, 3)
    assert "recommended" not in data
    assert "incomplete" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ([], "Give --model, or all of"),
        (["--layers", "3"], "Give --model, or all of"),
        (["--model", "absent", "--layers", "3"], "exclude each other"),
        (["--model", "absent"], "absent: cannot be read"),
        ([*MODEL, "--dtype", "int3"], "dtype='int3' is unknown"),
        ([*MODEL, "--tp", "3"], "tp=3 does not go with 8 KV heads"),
        ([*MODEL, "--tiers", "dram"], "not one more TIER=VALUE"),
        ([*MODEL, "--tiers", "dram=1GiB,dram=2GiB"], "not one more TIER=VALUE"),
        ([*MODEL, "--tiers", "dram=much"], "dram='much'"),
        ([*MODEL, "--tiers", "dram=256"], "dram has 256 bytes, and a block takes"),
        ([*MODEL, "--price", "dram=free"], "not a price above 0"),
        ([*MODEL, "--price", "dram=nan"], "not a price above 0"),
        ([*MODEL, "--price", "dram=0"], "not a price above 0"),
    ],
)
def test_what_makes_no_sense_is_refused(
    capsys: pytest.CaptureFixture[str], options: list[str], what: str
) -> None:
    assert main(["size", *options]) == BAD_INPUT
    captured = capsys.readouterr()
    assert what in captured.err
    assert captured.out == ""


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (["--policy", "all"], "size works with one"),
        (["--policy", "fifi"], "is not installed"),
        (["--tiers", "dram=1MiB"], "dram has 1,048,576 bytes, and a block"),
    ],
)
def test_what_does_not_go_with_the_trace_is_refused(
    trace: Path, capsys: pytest.CaptureFixture[str], options: list[str], what: str
) -> None:
    assert main(["size", *MODEL, "--trace", str(trace), *options]) == BAD_INPUT
    assert what in capsys.readouterr().err
