"""``stress.bench engine``: that both sides do the same work. Never how fast anything is."""

from __future__ import annotations

import json
import warnings
from typing import TYPE_CHECKING, Any

import pytest

from kvtier.errors import InternalError
from tests.vllm.bench.bench_process import BENCH_S_MAX, interrupt_bench, printed_bench, run_bench

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # as in conftest.py
    from stress.bench import engine
    from stress.bench.driven_engine import CallTimer
    from stress.bench.engine import COLD, DISK, DRAM, LOAD, RESTARTED
    from stress.bench.sides import KVTIER, SIDES, VLLM

if TYPE_CHECKING:
    from pathlib import Path


def phases() -> dict[str, dict[str, Any]]:
    """Return what one side's engines have done with two prompts."""
    found: dict[str, dict[str, Any]] = {
        name: {"tokens": [[1, 2], [3, 4]], "cached_tokens": 0 if name == COLD else 2 * 992}
        for name in (COLD, DRAM, DISK, RESTARTED)
    }
    return {**found, LOAD: {"cached_tokens": 2 * 992}}


@pytest.mark.parametrize(
    ("side", "phase", "wrong", "refusal"),
    [
        (KVTIER, DISK, {"tokens": [[1, 2], [3, 5]]}, "kvtier, disk: output tokens differ"),
        (VLLM, DRAM, {"cached_tokens": 96}, "vllm, DRAM: 96 tokens"),
    ],
    ids=["other-tokens", "computed-anew"],
)
def test_figures_of_engines_that_did_not_do_the_same_are_refused(
    side: str, phase: str, wrong: dict[str, Any], refusal: str
) -> None:
    found = {each: phases() for each in SIDES}
    engine.check(found, 2)
    found[side][phase] |= wrong
    with pytest.raises(InternalError, match=refusal):
        engine.check(found, 2)


def test_the_timer_adds_up_calls_by_steps() -> None:
    class Manager:
        def lookup(self, key: bytes) -> bytes:
            return key

        def __getattr__(self, name: str) -> Any:
            return lambda *_arguments: name

    manager, timer = Manager(), CallTimer()
    timer.time(manager)
    assert manager.lookup(b"k") == b"k"
    whole = timer.us_per_step()
    manager.on_schedule_end(None)
    manager.on_schedule_end(None)
    assert 0 < whole / 2 < timer.us_per_step()
    timer.restart()
    assert timer.us_per_step() == 0


def test_a_block_on_disk_is_not_a_hit_in_the_step_that_first_asks() -> None:
    found = engine.measure_steps("disk", blocks=8, block_bytes=4096)
    assert set(found) == {"known", "restarted"}
    assert all(steps[side] >= 2 for steps in found.values() for side in SIDES)


@pytest.mark.one_release
@pytest.mark.long
@pytest.mark.timeout(2 * BENCH_S_MAX)
def test_the_command_compares_real_engines(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    printed = printed_bench("explanation/scheduler-cost.md", "engine")
    run_bench(tmp_path, *printed, "--runs", "1", "--prompts", "2", "--json", str(report))
    data = json.loads(report.read_text())
    assert all(row["ratio"] == row[KVTIER] / row[VLLM] for row in data["rows"])
    (run,) = data["runs"]
    for side in SIDES:
        assert set(run[side]) == {COLD, DRAM, DISK, RESTARTED, LOAD}
        assert all(phase["manager_us_per_step"] > 0 for phase in run[side].values())


@pytest.mark.one_release
@pytest.mark.slow
def test_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    """The engine's process is in a session of its own and would not hear the terminal's."""
    interrupt_bench(tmp_path, "stress.bench.driven_engine", "engine", "--runs", "1")
