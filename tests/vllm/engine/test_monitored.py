"""A real Prometheus watches a real engine: panels have answers, alerts fire on their faults."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.needs import needs
from tests.support.patience import PATIENCE_S
from tests.vllm.support.children import child_environment

ROOT = Path(__file__).parents[3]


@needs("prometheus", "mount")
@pytest.mark.long  # ten minutes, by the clock: waiting times of alerts pass, at a sixtieth
@pytest.mark.timeout(15 * PATIENCE_S)
def test_panels_have_answers_and_alerts_fire_on_their_faults_alone(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "stress.monitored", "--report", tmp_path / "report.json"],
        cwd=ROOT,
        env=child_environment({}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=14 * PATIENCE_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-6000:]
    report = json.loads((tmp_path / "report.json").read_text())
    assert len(report["faults"]) == 7
