"""What ``kvtier replay --policies`` promises: a table and a report, and a part of them too."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

from kvtier.tools.cli.exit_status import BAD_INPUT, INTERRUPTED
from kvtier.tools.cli.main import main
from tests.unit.tools._interrupted import interrupt_replays

DRAW_CURVES = Path(__file__).resolve().parents[3] / "docs/draw_curves.py"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Two conversations that take turns, and a crowd that never comes back."""
    path = tmp_path / "trace.jsonl"
    rows = []
    for turn in range(1, 9):
        rows += [(turn, [100 * talk + block for block in range(turn)]) for talk in (0, 1)]
        rows += [(turn, [1000 + 10 * turn + other]) for other in range(5)]
    path.write_text(
        "".join(
            json.dumps({"time_s": time_s, "tokens": 16 * len(blocks), "blocks": blocks}) + "\n"
            for time_s, blocks in rows
        )
    )
    return path


def run(trace: Path, *options: str) -> int:
    return main(
        ["replay", str(trace), "--policies", "lru,arc", "--capacities", "10%,100%", *options]
    )


def test_the_table_has_a_row_for_each_policy_and_min(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(trace) == 0
    out = capsys.readouterr().out
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines() if line.strip()}
    assert rows["policy"][:4] == ["10.7", "%", "100", "%"]
    assert {"lru", "arc", "MIN"} <= rows.keys()
    assert rows["lru"][1] == rows["arc"][1] == rows["MIN"][1] == "0.5000"
    assert float(rows["lru"][0]) < float(rows["MIN"][0])


def test_the_report_says_what_the_table_says(trace: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    assert run(trace, "--json", str(report)) == 0
    data = json.loads(report.read_text())
    assert data["complete"] is True
    assert data["trace"]["distinct_blocks"] == 56
    assert data["trace"]["requests"] == 56
    assert [point["capacity_blocks"] for point in data["policies"]["MIN"]] == [6, 56]
    assert data["policies"]["MIN"][1]["hits"] == 56
    assert data["endless_hit_ratio"] == 0.5


def test_ctrl_c_leaves_a_valid_report_of_what_is_done(
    trace: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    interrupt_replays(monkeypatch, "kvtier.tools.replay.curves.replay", after=3)
    report = tmp_path / "report.json"
    assert run(trace, "--json", str(report)) == INTERRUPTED
    data = json.loads(report.read_text())
    assert data["complete"] is False
    assert [len(points) for points in data["policies"].values()] == [2, 1, 0]
    assert "interrupted" in capsys.readouterr().out
    assert sorted(tmp_path.iterdir()) == [report, trace]


def test_the_script_of_the_docs_draws_what_the_report_says(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Warnings are errors here: of axes without extent, of glyphs that are missing."""
    pytest.importorskip("matplotlib")
    report, picture = tmp_path / "report.json", tmp_path / "picture.png"
    assert run(trace, "--json", str(report)) == 0
    monkeypatch.setattr(sys, "argv", ["draw_curves.py", str(report), str(picture)])
    runpy.run_path(str(DRAW_CURVES), run_name="__main__")
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_bad_line_stops_the_run_or_is_skipped_as_asked(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with trace.open("a") as file:
        file.write("nonsense\n")
    assert run(trace) == BAD_INPUT
    assert "line 57: it is not JSON" in capsys.readouterr().err
    assert run(trace, "--on-bad-line", "skip") == 0
    captured = capsys.readouterr()
    assert "skipped 1 bad lines" in captured.err
    assert "line 57" in captured.err
    assert "lru" in captured.out


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (["--policies", "fifi"], "'fifi' is not installed"),
        (["--capacities", "0%"], "is neither a number of blocks"),
        (["--json", "/absent/report.json"], "there is no folder"),
        (["--block-tokens", "8"], "ids, but"),
    ],
)
def test_what_cannot_be_done_is_refused(
    trace: Path, capsys: pytest.CaptureFixture[str], options: list[str], what: str
) -> None:
    assert run(trace, *options) == BAD_INPUT
    captured = capsys.readouterr()
    assert what in captured.err
    assert captured.out == ""


def test_limit_reads_only_the_first_requests(trace: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    assert run(trace, "--limit", "20", "--json", str(report)) == 0
    assert json.loads(report.read_text())["trace"]["requests"] == 20
