"""``stress.bench start`` over a real disk tier, in fresh processes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from stress.bench.__main__ import main

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_each_start_finds_all_blocks_and_nothing_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place, report = tmp_path / "disk", tmp_path / "report.json"
    place.mkdir()
    options = ["--path", str(place), "--blocks", "1500", "--runs", "1", "--json", str(report)]
    assert main(["start", *options]) == 0
    (run,) = json.loads(report.read_text())["runs"]
    assert 0.0 < run["until the first block is announced"] <= run["until all are announced"]
    assert run["until the engine goes on"] > 0.0
    assert run["longest step meanwhile"] > 0.0
    assert "a start over a disk tier of 1,500 blocks" in capsys.readouterr().out
    assert list(place.iterdir()) == []
