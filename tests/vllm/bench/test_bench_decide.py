"""``stress.bench decide`` with real engines: what it measures. Never how fast it is."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.vllm.bench.bench_process import assert_ctrl_c_leaves_nothing, start_bench

if TYPE_CHECKING:
    from pathlib import Path

POLICIES = {"load", "recompute", "auto"}


@pytest.mark.one_release
@pytest.mark.long
def test_a_short_run_measures_each_cell_and_both_steps(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    options = ["decide", "--rates", "2GB,2MB", "--prompts", "1000", "--clients", "1,2"]
    options += ["--repeats", "2", "--step-requests", "5"]
    options += ["--json", str(report)]
    with start_bench(tmp_path, *options) as bench:
        assert bench.wait() == 0, bench.log()
        bench.assert_nothing_is_left()
    data = json.loads(report.read_text())
    cells = {(cell["tier"], cell["clients"]): cell for cell in data["cells"]}
    assert set(cells) == {(tier, n) for tier in ("2GB/s", "2MB/s") for n in (1, 2)}
    for (_, clients), cell in cells.items():
        assert set(cell["mean_s"]) == POLICIES
        for policy, turns in cell["turns"].items():
            assert all(len(turn["first_token_s"]) == clients for turn in turns)
            cached = sum(turn["cached_tokens"] for turn in turns)
            if policy == "recompute":
                assert cached == 0
            elif policy == "load":
                assert cached == 992 * clients * len(turns)
    assert cells["2MB/s", 1]["better"] == "recompute"
    assert [step["step"] for step in data["steps"]] == ["at first", "to slow", "back to fast"]
    assert all(len(step["first_token_s"]) == 5 for step in data["steps"])


@pytest.mark.one_release
@pytest.mark.long
def test_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    """The engines' processes are in sessions of their own and would not hear the terminal's."""
    options = ["decide", "--prompts", "1000"]
    assert_ctrl_c_leaves_nothing(tmp_path, *options, child="children stress.bench.decide")
