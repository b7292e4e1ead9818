"""``kvtier replay --policies`` and ``size`` that are interrupted, and their report as a picture.

What they print otherwise is in ``golden/others.txt``.
"""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvtier.tools.cli.exit_status import INTERRUPTED
from kvtier.tools.replay.curves import replay
from kvtier.tools.sizing.recommend import GIB
from kvtier_backends.disk.folder.claim import plan_folder

if TYPE_CHECKING:
    from kvtier.tools.replay.curves import CurvePoint
    from tests.unit.tools._shell import Shell

DRAW_CURVES = Path(__file__).resolve().parents[3] / "docs/draw_curves.py"
MODEL = ("--layers", "32", "--kv-heads", "8", "--head-dim", "128", "--dtype", "bfloat16")
POLICIES = ("--policies", "lru,arc", "--capacities", "10%,100%")


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Two conversations that take turns, and a crowd that never comes back."""
    rows = []
    for turn in range(1, 9):
        rows += [(turn, [100 * talk + block for block in range(turn)]) for talk in (0, 1)]
        rows += [(turn, [1000 + 10 * turn + other]) for other in range(5)]
    lines = [{"time_s": at_s, "tokens": 16 * len(ids), "blocks": ids} for at_s, ids in rows]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_recommended_disk_has_room_for_its_blocks(trace: Path, kvtier: Shell) -> None:
    """So that its hits are those of the curve; it is also priced at that size."""
    report = trace.with_name("report.json")
    priced = ("--price", "dram=3,disk=1", "--json", report)
    kvtier.shown("size", *MODEL, "--trace", trace, *priced)
    data = json.loads(report.read_text())
    disk = data["recommended"][-1]
    (tier,) = data["extra_config"]["secondary_tiers"]
    plan = plan_folder(tier["capacity_bytes"], data["bytes_per_block"], 0, None)
    assert plan.capacity_blocks >= disk["blocks"] == data["knee"]["blocks"]
    assert disk["price"] == tier["capacity_bytes"] / GIB


def test_a_tier_that_would_have_no_hits_is_left_out(trace: Path, kvtier: Shell) -> None:
    """The memory has to hold one long request, so the disk behind it would be as small."""
    long = {"time_s": 9, "tokens": 16 * 60, "blocks": [*range(5000, 5060)]}
    with trace.open("a") as file:
        file.write(f"{json.dumps(long)}\n")
    report = trace.with_name("report.json")
    shown = kvtier.shown(
        "size", *MODEL, "--trace", trace, "--price", "dram=3,disk=1", "--json", report
    )
    assert "Left out: disk, no larger than a faster tier: it has no hits." in shown
    data = json.loads(report.read_text())
    assert [tier["name"] for tier in data["recommended"]] == ["dram"]
    assert data["extra_config"]["secondary_tiers"] == []


@pytest.mark.parametrize(
    ("command", "replays", "said"),
    [
        (("replay", *POLICIES), "kvtier.tools.replay.curves.replay", "interrupted"),
        (("size", *MODEL, "--price", "dram=3"), "kvtier.tools.cli.sizing.replay", "incomplete"),
    ],
)
def test_ctrl_c_leaves_a_valid_report_of_what_is_done(
    command: tuple[str, ...],
    replays: str,
    said: str,
    trace: Path,
    monkeypatch: pytest.MonkeyPatch,
    kvtier: Shell,
) -> None:
    """Three replays are done by then. It recommends nothing."""
    done: list[CurvePoint] = []

    def interrupted(*arguments: Any) -> CurvePoint:
        if len(done) == 3:
            raise KeyboardInterrupt
        done.append(replay(*arguments))
        return done[-1]

    monkeypatch.setattr(replays, interrupted)
    report = trace.with_name("report.json")
    name, *options = command
    given = [trace] if name == "replay" else ["--trace", trace]
    assert said in kvtier.shown(name, *given, *options, "--json", report, status=INTERRUPTED)
    data = json.loads(report.read_text())
    assert not data["complete"]
    if name == "replay":
        assert [len(points) for points in data["policies"].values()] == [2, 1, 0]
    else:
        assert (data["knee"], len(data["curve"]), data.get("recommended")) == (None, 3, None)
    assert sorted(trace.parent.iterdir()) == [report, trace]


def test_the_script_of_the_docs_draws_what_the_report_says(
    trace: Path, monkeypatch: pytest.MonkeyPatch, kvtier: Shell
) -> None:
    """Warnings are errors here: of axes without extent, of glyphs that are missing."""
    pytest.importorskip("matplotlib")
    report, picture = trace.with_name("report.json"), trace.with_name("picture.png")
    kvtier.shown("replay", trace, *POLICIES, "--json", report)
    monkeypatch.setattr(sys, "argv", ["draw_curves.py", str(report), str(picture)])
    runpy.run_path(str(DRAW_CURVES), run_name="__main__")
    assert picture.read_bytes().startswith(b"\x89PNG")
