"""``stress.bench engine``: what it compares and how it reports. Never how fast anything is."""

from __future__ import annotations

import json
import warnings
from typing import TYPE_CHECKING, Any

import pytest

from kvtier.errors import InternalError
from stress.bench.__main__ import main
from tests.vllm.bench.bench_process import assert_ctrl_c_leaves_nothing, regions
from tests.vllm.support.children import run_scenario
from tests.vllm.support.forked_parts import run_forked

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # as in conftest.py
    from stress.bench import engine
    from stress.bench.engine import COLD, DISK, DRAM, LOAD, RESTARTED, CallTimer, measure_steps
    from stress.bench.sides import KVTIER, SIDES, VLLM

if TYPE_CHECKING:
    from argparse import Namespace
    from pathlib import Path


def arguments(**values: int) -> Namespace:
    from argparse import Namespace

    return Namespace(**{"prompts": 2, "prompt_tokens": 100, "runs": 1, "json": None, **values})


def side_phases() -> dict[str, dict[str, Any]]:
    phases: dict[str, dict[str, Any]] = {
        name: {"tokens": [[1, 2], [3, 4]], "cached_tokens": 0 if name == COLD else 192}
        for name in (COLD, DRAM, DISK, RESTARTED)
    }
    return {**phases, LOAD: {"cached_tokens": 192}}


def test_figures_of_other_tokens_are_refused() -> None:
    found = {side: side_phases() for side in SIDES}
    engine.check(found, arguments())
    found[KVTIER][DISK]["tokens"] = [[1, 2], [3, 5]]
    with pytest.raises(InternalError, match="kvtier, disk: output tokens differ"):
        engine.check(found, arguments())


def test_figures_of_prompts_that_were_computed_anew_are_refused() -> None:
    found = {side: side_phases() for side in SIDES}
    found[VLLM][DRAM]["cached_tokens"] = 96
    with pytest.raises(InternalError, match="vllm, DRAM: 96 tokens"):
        engine.check(found, arguments())


def test_the_timer_adds_up_calls_and_counts_steps() -> None:
    class Manager:
        def lookup(self, key: bytes, context: object) -> bytes:
            del context
            return key

        def on_schedule_end(self, context: object) -> None:
            del context

        def __getattr__(self, name: str) -> Any:
            return lambda *_arguments: name

    manager = Manager()
    timer = CallTimer(manager)
    for _ in range(3):
        assert manager.lookup(b"k", None) == b"k"
    manager.on_schedule_end(None)
    manager.on_schedule_end(None)
    found = timer.figures()
    assert found["steps"] == 2
    assert found["manager_calls_per_step"] == 5 / 2
    assert found["manager_us_per_step"] == pytest.approx(sum(found["manager_us"].values()) / 2)
    timer.restart()
    assert timer.figures()["steps"] == 0


def test_a_block_on_disk_is_not_a_hit_in_the_step_that_first_asks() -> None:
    found = measure_steps("disk", blocks=8, block_bytes=4096)
    assert set(found) == {"known", "restarted"}
    assert all(steps[side] >= 2 for steps in found.values() for side in SIDES)


def compare(report: str) -> None:
    """A scenario: the command, with each engine in a process of its own."""
    engine.run_child = run_forked
    options = ["--runs", "1", "--prompts", "2", "--prompt-tokens", "200"]
    assert main(["engine", *options, "--json", report]) == 0


@pytest.mark.one_release
@pytest.mark.slow
def test_the_command_compares_real_engines_and_leaves_nothing(
    tmp_path: Path, log_folder: Path
) -> None:
    report, folder = tmp_path / "report.json", tmp_path / "temporary"
    folder.mkdir()
    before = regions()
    environment = {"TMPDIR": str(folder)}
    run_scenario(
        compare, log_folder=log_folder, environment=environment, spawns=True, report=str(report)
    )
    assert list(folder.iterdir()) == []
    assert set(regions()) <= set(before)
    data = json.loads(report.read_text())
    for row in data["rows"]:
        assert row["ratio"] == row[KVTIER] / row[VLLM]
    (run,) = data["runs"]
    for side in SIDES:
        assert set(run[side]) == {COLD, DRAM, DISK, RESTARTED, LOAD}
        assert len(run[side][DRAM]["first_token_s"]) == 2
        assert run[side][LOAD]["tokens_per_s"] > 0
        assert run[side][LOAD]["manager_us"]["lookup"] > 0
    assert len(data["steps"]) == 1


@pytest.mark.one_release
@pytest.mark.slow
def test_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    """The engine's process is in a session of its own and would not hear the terminal's."""
    options = ["engine", "--runs", "1", "--prompts", "2"]
    assert_ctrl_c_leaves_nothing(tmp_path, *options, child="children stress.bench.engine")


@pytest.mark.one_release
def test_prompts_that_the_model_cannot_take_are_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["engine", "--prompt-tokens", "5000"]) == 2
    assert "--prompt-tokens 5000 must be between 64" in capsys.readouterr().err
