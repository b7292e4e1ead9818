"""What ``stress.bench decide`` is asked for and makes of its times. Running it: ``tests/vllm``."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from kvtier.tools.cli.exit_status import BAD_INPUT
from stress.bench.__main__ import main
from stress.bench.decide import OPTIONS, cell_figures, noticed_after
from stress.bench.decide_plan import AUTO, LOAD, RECOMPUTE, read_plan
from stress.bench.harness import read_options

if TYPE_CHECKING:
    from stress.bench.decide_plan import Plan


def plan_of(*options: str) -> Plan:
    return read_plan(read_options(OPTIONS, "decide", options))


def test_cells_go_from_the_fastest_tier_to_the_one_that_hangs() -> None:
    """A tier that has become faster takes a while to be noticed; that is the step's to show."""
    cells = plan_of(
        "--rates", "hang,2MB,2GB", "--prompts", "4_000,1000", "--clients", "8,1"
    ).cells()
    assert list(dict.fromkeys(cell.speed.name for cell in cells)) == ["2GB/s", "2MB/s", "hang"]
    assert [(cell.tokens, cell.clients) for cell in cells[:4]] == [
        (1000, 1),
        (1000, 8),
        (4000, 1),
        (4000, 8),
    ]
    assert cells[0].speed.rate.bytes_per_s == 2e9
    assert cells[-1].speed.rate.hangs


def test_a_step_is_between_the_fastest_and_the_slowest_tier_that_moves() -> None:
    speeds = plan_of("--rates", "hang,2MB,20MB/s,2GB").step_speeds
    assert speeds is not None
    assert [speed.name for speed in speeds] == ["2GB/s", "2MB/s"]
    assert plan_of("--rates", "hang,2MB").step_speeds is None


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--rates", "fast"], "'fast' is no rate"),
        (["--rates", ""], "'' is no rate"),
        (["--rates", "0MB"], "'0MB' is no rate"),
        (["--prompts", "10"], "--prompts '10'"),
        (["--prompts", "many"], "--prompts 'many'"),
        (["--clients", "0"], "--clients '0'"),
        (["--repeats", "0"], "--repeats 0"),
        (["--step-requests", "4"], "--step-requests 4"),
        (["--json", "no/such/folder/report.json"], "no/such/folder"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_bad_options_are_refused_before_the_work(
    options: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["decide", *options]) == BAD_INPUT
    assert named in capsys.readouterr().err


def test_a_cell_is_judged_by_the_better_of_both_choices() -> None:
    found = cell_figures({LOAD: [1.0, 3.0], RECOMPUTE: [5.0], AUTO: [1.0, 2.0, 3.0, 4.0]})
    assert found["better"] == LOAD
    assert found["ratio"] == pytest.approx(2.5 / 2.0)
    assert found["ratio_of_medians"] == pytest.approx(2.5 / 2.0)


@pytest.mark.parametrize(
    ("times", "after"),
    [
        ([1.0] * 8, 0),
        ([9.0, 9.0, 9.0, 1.0, 1.0, 1.0, 1.0, 1.0], 1),
        ([9.0] * 5 + [1.0, 9.0, 1.0, 9.0, 1.05], 5),
        ([9.0] * 8, None),
    ],
)
def test_a_step_is_noticed_from_where_most_requests_are_as_fast_as_the_better_choice(
    times: list[float], after: int | None
) -> None:
    assert noticed_after(times, 1.0) == after


@pytest.mark.parametrize("benchmark", ["ops", "engine", "decide", "disk"])
def test_without_vllm_it_says_what_to_install(
    benchmark: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    assert main([benchmark]) == BAD_INPUT
    message = capsys.readouterr().err
    assert "not installed" in message
    assert "pip install 'vllm>=0.32,<0.34'" in message
    assert "pip install --no-deps -r requirements/engine-cpu.txt" in message
