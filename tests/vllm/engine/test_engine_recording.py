"""A record of a real engine's requests: its replay has the hits that the engine had."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import zstandard

from kvtier.tools.cli.main import main
from tests.vllm.support.children import run_scenario
from tests.vllm.support.engine import engine, kvtier_config
from tests.vllm.support.play import play_round, prompts_of

if TYPE_CHECKING:
    from pathlib import Path

LENGTHS = [500, 1000, 333, 31]  #: in tokens; the last one is shorter than a block


def recorded(model: str, folder: str) -> dict[str, Any]:
    """Play cold, from DRAM and from disk."""
    tiers = [{"type": "disk", "path": f"{folder}/kv", "capacity_bytes": "64MiB"}]
    record = f"{folder}/record-{{dp_rank}}.zst"
    config = kvtier_config(
        cpu_bytes_to_use="64MiB", secondary_tiers=tiers, on_reset="keep", record=record
    )
    with engine(model, config) as running:
        rounds = [play_round(running, prompts_of(LENGTHS)) for _ in range(2)]
        running.empty_dram()
        rounds.append(play_round(running, prompts_of(LENGTHS)))
    return {"rounds": rounds}


def test_a_replay_of_a_record_has_the_engines_hits(
    llama: Path, tmp_path: Path, log_folder: Path
) -> None:
    """To within one per cent, though it has other tiers, and computes nothing."""
    run_scenario(recorded, log_folder=log_folder, model=str(llama), folder=str(tmp_path))
    record, report = tmp_path / "record-0.zst", tmp_path / "report.json"
    reader = zstandard.ZstdDecompressor().stream_reader(
        record.read_bytes(), read_across_frames=True
    )
    rows = [json.loads(line) for line in reader.read().splitlines()]
    rows = [row for row in rows if "tokens" in row]
    from_tiers: dict[str, int] = {}
    for row in rows:
        for tier, tokens in row["loaded_tokens"].items():
            from_tiers[tier] = from_tiers.get(tier, 0) + tokens
    assert from_tiers.keys() == {"0:primary", "1:disk"}
    hits = sum(from_tiers.values()) + sum(row["gpu_tokens"] for row in rows)
    status = main(
        [
            *("replay", str(record), "--dram", "64MiB", "--block-bytes", "64KiB"),
            *("--tier", f"disk:{tmp_path / 'replayed'}:64MiB", "--json", str(report)),
        ]
    )
    assert not status
    replayed = json.loads(report.read_text())
    requests = replayed["requests"]
    found = requests["input_tokens"] - requests["computed_tokens"]
    assert abs(found - hits) <= hits / 100
