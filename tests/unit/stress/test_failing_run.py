"""A run that meets a broken promise says so, with its seed, and leaves nothing behind."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvtier.engine.tier_link import TierLink
from stress import load
from stress.__main__ import main
from stress.resources import resources_now

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.slow

SHORT = ["--seed", "8841", "--minutes", "0.05", "--faults", "none"]


def wrong_bytes(patch: pytest.MonkeyPatch) -> None:
    """Have some blocks stored with the bytes of other weights."""
    real = load.content_of
    patch.setattr(
        load, "content_of", lambda key, weights: real(key, weights + "?" * (key[0] % 16 == 0))
    )


def falling_counters(patch: pytest.MonkeyPatch) -> None:
    """Have a counter fall as soon as a tier is asked."""
    real = TierLink._probe_keys

    def fall(link: TierLink, message: object) -> None:
        link.counts.queries -= 1
        real(link, message)  # type: ignore[arg-type] # handed on

    patch.setattr(TierLink, "_probe_keys", fall)


def missing_events(patch: pytest.MonkeyPatch) -> None:
    """Have nothing told of what becomes resident."""
    patch.setattr("kvtier.core.events.EventLog.drain", lambda _log: [])


@pytest.mark.parametrize(
    ("plant", "said"),
    [
        (wrong_bytes, "wrong bytes for"),
        (falling_counters, "queries fell from"),
        (missing_events, "events tell of 0 resident blocks, there are"),
    ],
)
def test_a_broken_promise_ends_the_run_with_its_seed(
    plant: Callable[[pytest.MonkeyPatch], None],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = resources_now()
    plant(monkeypatch)
    assert main(SHORT) == 1
    error = capsys.readouterr().err
    assert "FAILED    runtime, seed 8841" in error
    assert said in error
    left = resources_now().left_since(before)
    assert "processes" not in left, left


def test_a_short_run_without_faults_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(SHORT) == 0
    assert "PASSED    runtime, seed 8841" in capsys.readouterr().out
