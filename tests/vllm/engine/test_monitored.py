"""A real Prometheus watches a real engine: panels have answers, alerts fire on their faults."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.support.needs import needs
from tests.support.patience import PATIENCE_S
from tests.vllm.support.children import run_program

if TYPE_CHECKING:
    from pathlib import Path


@needs("prometheus", "mount")
@pytest.mark.long  # ten minutes, by the clock: waiting times of alerts pass, at a sixtieth
@pytest.mark.timeout(15 * PATIENCE_S)
def test_panels_have_answers_and_alerts_fire_on_their_faults_alone(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    run_program("-m", "stress.monitored", "--report", file, timeout_s=14 * PATIENCE_S)
    report = json.loads(file.read_text())
    assert len(report["faults"]) == 7
