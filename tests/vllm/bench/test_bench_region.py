"""``stress.bench start --region``: host memory as an engine on the CPU makes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from kvtier.settings.host_memory import SHARED_MEMORY_FOLDER
from kvtier.tools.cli.exit_status import BAD_INPUT
from kvtier.vllm.region import NAME_PREFIX
from stress.bench.__main__ import main

if TYPE_CHECKING:
    import pytest


def regions() -> set[str]:
    return {each.name for each in Path(SHARED_MEMORY_FOLDER).glob(f"{NAME_PREFIX}bench-start-*")}


def test_host_memory_is_measured_as_an_engine_makes_it_and_nothing_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report, before = tmp_path / "report.json", regions()
    assert main(["start", "--region", "1GiB", "--runs", "1", "--json", str(report)]) == 0
    (run,) = json.loads(report.read_text())["runs"]
    assert all(seconds > 0.0 for seconds in run.values())
    assert "host memory of 1 GiB on the CPU" in capsys.readouterr().out
    assert regions() <= before
    assert main(["start", "--region", "4MiB"]) == BAD_INPUT
    assert "--region 4MiB" in capsys.readouterr().err
