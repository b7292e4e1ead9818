"""Requests that end in the step in which their stores are sent, as vLLM's connector ends them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.request import RequestStatus

from kvtier.tier import bounded_tier
from tests.support.container_sizes import container_sizes, grown
from tests.support.patience import looks
from tests.vllm.support.connector import BLOCK_BYTES, BLOCK_TOKENS, Connector, connector

if TYPE_CHECKING:
    import pytest

SLOTS = 16
PROMPTS = 24  #: of three blocks: more than fit
SOME = 96
TIER = {"type": "memory", "capacity_bytes": 2 * SLOTS * BLOCK_BYTES, "enable_kv_events": True}


def serve(engine: Connector, numbers: range) -> None:
    """Serve requests; each is over before its blocks have left the GPU."""
    for number in numbers:
        name = f"r{number}"
        engine.start(name, [number % PROMPTS] * (3 * BLOCK_TOKENS) + [1])
        tokens = engine.matched(name)
        for _ in looks():
            if tokens is not None:
                break
            engine.end_step()
            tokens = engine.matched(name)
        if tokens:
            engine.load(name, tokens)
            engine.complete(engine.end_step())
        step = engine.end_step([] if tokens else [name])
        request = engine.requests.pop(name)
        request.status = RequestStatus.FINISHED_STOPPED
        engine.real.request_finished(request)
        engine._finished.add(name)
        engine.complete(step, engine.end_step())
        list(engine.real.take_events())
        engine.manager.get_stats()
    engine.settle()
    engine.until(lambda: not engine.manager.facade.has_pending_work())
    list(engine.real.take_events())


def test_they_leave_nothing_behind_in_the_manager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_tier, "ENDED_REQUESTS_MAX", 8)
    with connector(
        slots=SLOTS,
        windows=(None, 4 * BLOCK_TOKENS),
        kv_events=True,
        self_describing_kv_events=True,
        secondary_tiers=[TIER],
    ) as engine:
        serve(engine, range(SOME))
        assert engine.tier().counts.cascade_jobs
        before = container_sizes(engine.manager)
        serve(engine, range(SOME, 3 * SOME))
        assert grown(before, container_sizes(engine.manager), by=SOME) == {}
