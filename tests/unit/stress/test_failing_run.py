"""A run that meets a broken promise says so, with its seed, and leaves nothing behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]

pytestmark = pytest.mark.slow


def run(plant: str) -> subprocess.CompletedProcess[str]:
    """Run for a few requests: counts end it, and no clock."""
    return subprocess.run(
        [sys.executable, "-m", "tests.unit.stress.broken_promises", plant],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("plant", "said"),
    [
        ("wrong_bytes", "wrong bytes for"),
        ("falling_counters", "queries fell from"),
        ("missing_events", "events tell of 0 resident blocks, there are"),
    ],
)
def test_a_broken_promise_ends_the_run_with_its_seed(plant: str, said: str) -> None:
    ended = run(plant)
    assert ended.returncode == 1, ended.stderr
    assert "FAILED    runtime, seed 8841" in ended.stderr
    assert said in ended.stderr
    assert "\n0 processes left" in ended.stdout


@pytest.mark.long
def test_a_short_run_without_faults_passes() -> None:
    """`make soak` shows the same with faults."""
    ended = run("nothing")
    assert ended.returncode == 0, ended.stderr
    assert "PASSED    runtime, seed 8841" in ended.stdout
    assert "\n0 processes left" in ended.stdout
