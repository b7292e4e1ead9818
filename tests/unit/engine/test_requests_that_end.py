"""Requests that end in the step in which their blocks are sent leave nothing behind."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvtier import RuntimeConfig, TierConfig
from kvtier.plugin_api.backend import BackendTraits, Outcome
from kvtier.policies.eviction.arc import ARCPolicy
from kvtier.policies.eviction.lru import LRUPolicy
from kvtier.policies.eviction.reuse.policy import ReusePolicy
from kvtier.tier import bounded_tier
from tests.support.cell import TestRuntime, open_test_runtime
from tests.support.container_sizes import container_sizes, grown

if TYPE_CHECKING:
    from kvtier.plugin_api.eviction_policy import EvictionPolicy

SLOTS = 32
CAPACITY = 48  #: of the bounded tier
KEYS = [number.to_bytes(4, "big") + bytes(4) for number in range(96)]
POLICIES = (LRUPolicy, ARCPolicy, ReusePolicy)
REMEMBERED = 8  #: requests that are over, by tiers
SOME = 200
MANY = 1_000_000


class Engine:
    """A runtime with a tier that evicts and one that does not, whose backends answer when told."""

    def __init__(self, policy: type[EvictionPolicy]) -> None:
        self.now = 0.0
        names = ("1:bounded", "2:shared")
        config = RuntimeConfig(
            slot_count=SLOTS,
            block_bytes=16,
            tiers=tuple(
                TierConfig(name=name, type="test", enable_kv_events=True) for name in names
            ),
        )
        tiers = [
            (BackendTraits(2, 2, CAPACITY), policy(CAPACITY)),
            (BackendTraits(2, 2), None),
        ]
        self.runtime: TestRuntime = open_test_runtime(
            config, policy(SLOTS), tiers, clock=lambda: self.now
        )
        self._requests = 0

    def serve(self, requests: int, lag: int) -> None:
        """Serve requests that end in the step that stores their blocks.

        Tiers answer once in ``lag`` requests, and at the end.
        """
        for number in range(requests):
            self._serve()
            if number % lag == lag - 1:
                self.answer()
        self.answer()

    def _serve(self) -> None:
        facade, number = self.runtime.facade, self._requests
        self._requests += 1
        request, at = f"request {number}", number * 7 % (len(KEYS) - 3)
        keys = KEYS[at : at + 3]
        facade.on_request_started(request)
        if number % 3 == 0:
            facade.lookup_prefix(keys, request)
        facade.on_requests_scheduled([request])
        grant = facade.prepare_store(keys, request)
        if grant is not None and number % 5 == 0:  # before it ends
            facade.complete_store(grant.keys, request)
            grant = None
        facade.on_request_finished(request, keys if number % 2 else None)
        facade.step_end()
        if grant is not None:
            facade.complete_store(grant.keys, request, success=number % 11 > 0)
        facade.take_events()
        facade.drain_observations()
        self.now += 0.001

    def answer(self) -> None:
        """Have the backends end all that they were given."""
        cell, tiers = self.runtime.cell, self.runtime.tiers
        cell.settle()
        while any(tier.batches for tier in tiers) or self.runtime.facade.has_pending_work():
            for tier in tiers:
                for batch in list(tier.batches):
                    tier.answer(batch, [Outcome.DONE] * len(batch.keys))
            cell.settle()
            self.now += 0.01
            self.runtime.facade.step_end()
            cell.settle()
        self.runtime.facade.take_events()

    def sizes(self) -> dict[str, int]:
        """Return the sizes of all containers."""
        return container_sizes(self.runtime.facade, self.runtime.engine, *self.runtime.tiers)


@pytest.mark.parametrize(
    ("policy", "lag"), [(ReusePolicy, 1), *((policy, 4 * REMEMBERED) for policy in POLICIES)]
)
def test_they_leave_nothing_behind(
    policy: type[EvictionPolicy], lag: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow tier stores blocks of requests that no longer count as over: none ends again."""
    monkeypatch.setattr(bounded_tier, "ENDED_REQUESTS_MAX", REMEMBERED)
    engine = Engine(policy)
    engine.serve(SOME, lag)
    before = engine.sizes()
    engine.serve(3 * SOME, lag)
    assert grown(before, engine.sizes(), by=len(KEYS)) == {}


def resident_kib() -> int:
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))


@pytest.mark.long
@pytest.mark.timeout(0)
def test_a_million_of_them_take_no_memory() -> None:
    """Eight bytes for each of them, a reference, would show."""
    engine = Engine(ReusePolicy)
    engine.serve(MANY // 20, 50)
    gc.collect()
    before, resident = engine.sizes(), resident_kib()
    engine.serve(MANY, 50)
    gc.collect()
    assert grown(before, engine.sizes(), by=len(KEYS)) == {}
    assert resident_kib() - resident < 8 * MANY / 1024
