"""``stress.bench decide`` with real engines: what it measures. Never how fast it is."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.vllm.bench.bench_process import BENCH_S_MAX, printed_bench, run_bench

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.one_release
@pytest.mark.long
@pytest.mark.timeout(2 * BENCH_S_MAX)
def test_each_policy_loads_or_computes_what_it_should(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    printed = printed_bench("explanation/load-or-recompute.md", "decide")
    options = ["--rates", "2GB,2MB", "--prompts", "1000", "--clients", "1,2", "--repeats", "2"]
    run_bench(tmp_path, *printed, *options, "--step-requests", "5", "--json", str(report))
    data = json.loads(report.read_text())
    cells = {(cell["tier"], cell["clients"]): cell for cell in data["cells"]}
    assert set(cells) == {(tier, n) for tier in ("2GB/s", "2MB/s") for n in (1, 2)}
    for (_, clients), cell in cells.items():
        cached = cell["cached_tokens"]
        assert set(cached["recompute"]) == {0}
        assert set(cached["load"]) == {992 * clients}
        assert len(cell["first_token_s"]["auto"]) == 2 * clients
    assert cells["2MB/s", 1]["better"] == "recompute"
    assert [step["step"] for step in data["steps"]] == ["at first", "to slow", "back to fast"]
    assert all(len(step["first_token_s"]) == 5 for step in data["steps"])
