"""A record of a real engine's requests: its replay has the hits that the engine had.

The caches are small, so that most blocks leave them again; clients return to conversations, which
share a head; the engine's own prefix cache has some of it. The policy is ``lru``: ``reuse`` learns
by the second, and two runs of one engine are several per cent apart with it.
"""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import zstandard

from kvtier.tools.cli.main import main
from tests.vllm.support.children import run_scenario
from tests.vllm.support.engine import engine, kvtier_config, make_prompts

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

CONVERSATIONS = 14
REQUESTS_A_ROUND = 10
TOKENS_MAX = 1400  #: of a conversation; the engine's own cache has room for 2,208
SHARED_TOKENS = 320
LRU = {"eviction_policy": "lru"}


def config_of(folder: str, **options: Any) -> dict[str, Any]:
    """Return an engine's configuration: 128 blocks in DRAM, 129 on disk, and the rest in files."""
    disk = {"type": "disk", "path": f"{folder}/disk", "capacity_bytes": "12MiB", **LRU}
    tiers = [disk, {"type": "fs", "root_dir": f"{folder}/fs", **LRU}]
    return kvtier_config(cpu_bytes_to_use="8MiB", secondary_tiers=tiers, **LRU, **options)


def recorded(model: str, folder: str, rounds: int, faults: bool) -> dict[str, float]:
    """Play, perhaps with faults in both tiers, and return the tokens that were loaded, by tier."""
    happens: dict[int, Callable[[], None]] = {}
    if faults:
        happens = {
            3: lambda: os.kill(process_that_uses(f"{folder}/disk"), signal.SIGKILL),
            8: lambda: take_away(Path(folder, "fs")),
            11: lambda: bring_back(Path(folder, "fs")),
        }
    choose = random.Random(3)
    (head,) = make_prompts(1, SHARED_TOKENS)
    asked = [head + make_prompts(1, choose.randrange(150, 500), n)[0] for n in range(CONVERSATIONS)]
    with engine(model, config_of(folder, record=f"{folder}/record-{{dp_rank}}.zst")) as running:
        for number in range(rounds):
            happens.get(number, int)()
            for which in choose.sample(range(CONVERSATIONS), REQUESTS_A_ROUND):
                answer = running.run([asked[which]]).tokens[0]
                if len(asked[which]) < TOKENS_MAX:
                    more = make_prompts(1, choose.randrange(10, 120), len(asked[which]))[0]
                    asked[which] = asked[which] + answer + more
                if choose.random() < 0.4:  # the GPU has most of it
                    running.run([asked[which]])
            if number % 3 == 2:
                running.forget()
        running.settle()
        metrics = running.metrics()
    return {
        name: metrics.get(f'kvtier:loaded_tokens{{tier="{name}"}}', 0.0)
        for name in ("0:primary", "1:disk", "2:fs")
    }


def process_that_uses(folder: str) -> int:
    """Return the tier's process that has files of the folder open: not the engine's, its child."""
    (found,) = {
        int(link.parts[2])
        for link in Path("/proc").glob("[0-9]*/fd/*")
        if link.parts[2] != str(os.getpid()) and target_of(link).startswith(folder)
    }
    return found


def target_of(link: Path) -> str:
    try:
        return str(link.readlink())
    except OSError:  # it is closed by now
        return ""


def take_away(folder: Path) -> None:
    """Have every access to the folder fail."""
    folder.rename(folder.with_suffix(".away"))
    folder.touch()


def bring_back(folder: Path) -> None:
    folder.unlink()
    folder.with_suffix(".away").rename(folder)


def rows_of(record: Path) -> list[dict[str, Any]]:
    reader = zstandard.ZstdDecompressor().stream_reader(
        record.read_bytes(), read_across_frames=True
    )
    return [json.loads(line) for line in reader.read().splitlines()]


def replayed(folder: Path) -> dict[str, Any]:
    """Return the report on a replay, with the engine's own configuration."""
    config, report = folder / "config.json", folder / "report.json"
    config.write_text(json.dumps(config_of(str(folder / "replayed"))))
    arguments = ["--config", str(config), "--block-bytes", "64KiB", "--json", str(report)]
    assert not main(["replay", str(folder / "record-0.zst"), *arguments])
    found: dict[str, Any] = json.loads(report.read_text())
    return found


def tokens_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return the tokens that recorded requests loaded, by tier."""
    names = {name for row in rows for name in row.get("loaded_tokens", ())}
    return {
        name: sum(row["loaded_tokens"].get(name, 0) for row in rows if "tokens" in row)
        for name in names
    }


def assert_same_hits(folder: Path, engines: Mapping[str, float]) -> dict[str, Any]:
    """Compare the engine's hits, the record's, and the replay's; return the replay's report."""
    rows = rows_of(folder / "record-0.zst")
    assert tokens_of(rows) == engines
    assert min(engines.values()) > 500, "every tier is to have a part in it"
    assert sum(row["gpu_tokens"] for row in rows if "tokens" in row) > 10_000
    report = replayed(folder)
    assert report["recorded"]["loaded_tokens"] == engines
    hits = {tier["name"]: tier["hit_tokens"] for tier in report["tiers"]}
    off = sum(hits.values()) - sum(engines.values())
    assert abs(off) <= sum(engines.values()) / 100, (engines, hits)
    return report


def test_a_replay_of_a_record_has_the_engines_hits(
    llama: Path, tmp_path: Path, log_folder: Path
) -> None:
    """To within one per cent, though it computes nothing and does not look at those recorded."""
    folder = str(tmp_path)
    engines = run_scenario(
        recorded, log_folder=log_folder, model=str(llama), folder=folder, rounds=9, faults=False
    )
    report = assert_same_hits(tmp_path, engines)
    assert report["recorded"]["events"] == 0


@pytest.mark.long  # how long a fault lasts is a matter of seconds, whatever the load
def test_a_replay_of_a_record_has_the_faults_that_the_engine_had(
    llama: Path, tmp_path: Path, log_folder: Path
) -> None:
    """The disk tier's process is killed, and later the other tier's folder is away for a while."""
    folder = str(tmp_path)
    engines = run_scenario(
        recorded, log_folder=log_folder, model=str(llama), folder=folder, rounds=30, faults=True
    )
    assert_same_hits(tmp_path, engines)
    events = [row for row in rows_of(tmp_path / "record-0.zst") if "event" in row]
    found = {(row["event"], row["tier"]) for row in events}
    # The folder may be back before the tier is asked for what only it has.
    assert found >= {("tier_down", "1:disk"), ("tier_up", "1:disk")}
