"""What ``make gpu`` and ``make gpu-engine`` run, as far as that can be tried without a GPU.

The whole engine on the CPU takes two minutes: ``make test-long`` runs it.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cuda import NO_DEVICE
from tests.vllm.support.children import child_environment

RIG = ["tests.rig", "--device"]
ENGINE = ["tests.vllm.gpu_engine", "--device"]
SCENARIOS = 10


def run(*arguments: str, **environment: str) -> tuple[int, str]:
    """Run one of the programs; return its exit status and what it printed."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", *arguments],
        cwd=Path(__file__).parents[3],
        env=child_environment(environment),
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr[-4000:]


@pytest.mark.one_release
@pytest.mark.parametrize("program", [RIG, ENGINE], ids=["rig", "engine"])
def test_without_a_device_a_program_says_so_and_does_not_pass(program: list[str]) -> None:
    """A script must not take it for a check that was passed."""
    status, told = run(*program, "cuda", CUDA_VISIBLE_DEVICES="")
    assert status == NO_DEVICE == 77
    assert "a CUDA device" in told
    assert told.endswith("Nothing was checked.\n")


@pytest.mark.slow
@pytest.mark.one_release
def test_the_rig_over_vllms_cuda_worker_in_host_memory() -> None:
    """vLLM's worker and region with kvtier's header; the mistakes planted there are found."""
    scenarios = ("--first", "0", "--count", str(SCENARIOS))
    status, told = run(*RIG, "pretended", *scenarios, PYTHONHASHSEED="0")
    assert status == 0, told
    assert f"{SCENARIOS} scenarios" in told
    for mistake in ("load_from_another_slot", "report_before_the_copy"):
        assert f"{mistake}: found" in told
