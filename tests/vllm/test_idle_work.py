"""What an engine without requests steps for, once for each piece of news."""

from __future__ import annotations

import os
import signal
import threading
from typing import TYPE_CHECKING

import pytest

from kvtier.hosts.process_host import TierProcess
from kvtier.vllm.scheduler import idle_work
from tests.support.patience import until
from tests.vllm.support.connector import BLOCK_BYTES, connector

if TYPE_CHECKING:
    from tests.vllm.support.connector import Connector

TIER = {"type": "memory", "capacity_bytes": 1 << 20, "isolation": "process"}


def comes_to_rest(engine: Connector) -> bool:
    """Step as vLLM's loop does while it is asked to."""
    if not engine.manager.has_pending_work():
        return True
    engine.end_step()
    list(engine.real.take_events())
    engine.manager.get_stats()
    return False


@pytest.mark.parametrize("kv_events", [True, False], ids=["events", "gauges_only"])
def test_a_tier_that_is_killed_is_something_to_step_for(
    kv_events: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idle_work, "LOOK_S", 0.0)
    tier = {**TIER, "enable_kv_events": kv_events}
    with connector(slots=8, secondary_tiers=[tier], kv_events=kv_events) as engine:
        until(lambda: engine.tier().breaker == "CLOSED" and comes_to_rest(engine))
        engine.store("r", range(8))
        until(lambda: comes_to_rest(engine))
        os.kill(engine.manager.facade._tiers[0]._child.process.pid, signal.SIGKILL)
        until(engine.manager.has_pending_work)
        assert engine.tier().breaker == "DISABLED"
        until(lambda: comes_to_rest(engine))


def test_what_a_tier_could_not_take_is_something_to_step_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So an engine that goes idle meanwhile stores it all the same."""
    monkeypatch.setattr(idle_work, "LOOK_S", 0.0)
    restart, may_begin = TierProcess._restart, threading.Event()
    monkeypatch.setattr(TierProcess, "_restart", lambda host: may_begin.is_set() and restart(host))
    with connector(slots=8, secondary_tiers=[TIER]) as engine:
        until(lambda: engine.tier().breaker == "CLOSED" and comes_to_rest(engine))
        os.kill(engine.manager.facade._tiers[0]._child.process.pid, signal.SIGKILL)
        until(lambda: comes_to_rest(engine) and engine.tier().breaker == "DISABLED")
        stored = engine.store("r", range(32))
        assert engine.tier().counts.stores_deferred == stored == 8
        may_begin.set()
        until(lambda: comes_to_rest(engine))
        assert engine.tier().counts.write_bytes == 8 * BLOCK_BYTES
