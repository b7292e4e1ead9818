"""A run that meets a broken promise says so, with its seed, and leaves nothing behind.

It runs in a process of its own, which is this module, so that what it leaves is told apart.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

import pytest

from kvtier.core.events import EventLog
from kvtier.engine.link.probes import Probes
from stress import load
from stress.__main__ import main
from stress.runtime.layer import RuntimeLayer
from stress.runtime.processes import children
from tests.support.patience import until
from tests.unit.tools._read_page import ReadPage
from tests.unit.tools._shell import Shell

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

REPOSITORY = Path(__file__).parents[3]

pytestmark = pytest.mark.slow


def nothing() -> AbstractContextManager[object]:
    """Have a few requests: enough to be served from each tier."""
    return mock.patch.multiple(RuntimeLayer, requests_min=500, blocks_read_min=500)


def wrong_bytes() -> AbstractContextManager[object]:
    """Have some blocks stored with the bytes of other weights."""
    real = load.content_of

    def wrong(key: bytes, weights: str) -> bytes:
        return real(key, weights + "?" * (key[0] % 16 == 0))

    return mock.patch.object(load, "content_of", wrong)


def falling_counters() -> AbstractContextManager[object]:
    """Have a counter fall as soon as a tier is asked."""
    real = Probes.ask

    def fall(probes: Probes, message: object) -> None:
        probes._counts.queries -= 10**6  # more than is added meanwhile
        real(probes, message)  # type: ignore[arg-type] # handed on

    return mock.patch.object(Probes, "ask", fall)


def missing_events() -> AbstractContextManager[object]:
    """Have nothing told of what becomes resident."""
    return mock.patch.object(EventLog, "drain", return_value=[])


PLANTS = {each.__name__: each for each in (nothing, wrong_bytes, falling_counters, missing_events)}


@pytest.mark.parametrize(
    ("plant", "status", "said"),
    [
        ("wrong_bytes", 1, "wrong bytes for"),
        ("falling_counters", 1, "queries fell from"),
        ("missing_events", 1, "events tell of 0 resident blocks, there are"),
        # `make soak` shows the same with faults.
        pytest.param("nothing", 0, "PASSED    runtime, seed 8841", marks=pytest.mark.long),
    ],
)
def test_a_broken_promise_ends_the_run_with_its_seed(
    plant: str, status: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Counts end the run, and no clock. Its page is what ``kvtier report`` draws of its JSON."""
    ended = subprocess.run(
        [sys.executable, "-m", "tests.unit.stress.test_failing_run", plant, str(tmp_path)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == status, ended.stderr
    assert ("FAILED    runtime, seed 8841" in ended.stderr) is bool(status)
    assert said in ended.stderr + ended.stdout
    assert "\n0 processes left" in ended.stdout
    html = Shell(capsys).shown("report", tmp_path / "report.json")
    assert html == (tmp_path / "report.html").read_text()
    page = ReadPage(html)
    assert page.title == "kvtier soak: runtime, seed 8841"
    assert page.verdict == ("failed" if status else "passed")
    assert (said in "".join(page.root.itertext())) is bool(status)


if __name__ == "__main__":
    with PLANTS[sys.argv[1]]():
        ended_with = main(["--gate", "--seed", "8841", "--faults", "none", "--report", sys.argv[2]])
    # On a busy machine a tier may have been killed at close, and take a moment to end.
    until(lambda: not children(), lambda: f"{len(children())} processes left")
    print("0 processes left")
    sys.exit(ended_with)
