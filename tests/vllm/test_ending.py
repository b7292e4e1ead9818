"""What an engine that was asked to end waits for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtier.vllm.workarounds.ending import ENDING
from tests.support.patience import until
from tests.vllm.support.connector import connector

if TYPE_CHECKING:
    import pytest

TIER = {"type": "memory", "capacity_bytes": 1 << 20, "faults": {"store": {"hang": True}}}


def test_stores_that_hang_hold_up_the_end_for_close_timeout_s_at_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM killed the engine with all its tiers when ``--shutdown-timeout`` was over."""
    with connector(slots=8, secondary_tiers=[TIER], close_timeout_s=0.2) as engine:
        engine.start("r", range(8))
        engine.matched("r")
        engine.complete(engine.end_step(["r"]))
        engine.finish("r")
        until(lambda: engine.tier().cascade_jobs_in_flight)
        assert engine.manager.has_pending_work()
        monkeypatch.setattr(ENDING, "_since_s", 0.0)
        assert not engine.manager.has_pending_work()
