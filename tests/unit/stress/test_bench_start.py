"""``stress.bench start`` over a real disk tier, in fresh processes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from kvtier.tools.cli.exit_status import BAD_INPUT
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
    assert 0.0 < run["until the first block is told"] <= run["until all are told"]
    assert run["until the engine goes on"] > 0.0
    assert run["longest step meanwhile"] > 0.0
    assert "a start over a disk tier of 1,500 blocks" in capsys.readouterr().out
    assert list(place.iterdir()) == []


def test_a_size_that_no_page_divides_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["start", "--block-bytes", "5000"]) == BAD_INPUT
    assert "--block-bytes 5000" in capsys.readouterr().err


def test_a_folder_that_is_not_there_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["start", "--path", str(tmp_path / "none")]) == BAD_INPUT
    assert "is no folder" in capsys.readouterr().err
