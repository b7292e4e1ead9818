"""What the tests of the facade's promises share: a runtime in the test cell, and its tiers."""

from __future__ import annotations

from typing import Any

from kvtier import RuntimeConfig, TierConfig
from kvtier.plugin_api.backend import BackendTraits, Outcome
from kvtier.policies.eviction.lru import LRUPolicy
from tests.support.cell import Batch, TestRuntime, open_test_runtime


class Story:
    """A runtime with eight slots, and one shared tier unless told otherwise."""

    def __init__(self, *, slots: int = 8, tiers: int = 1, **settings: Any) -> None:
        """``policy``, ``whole`` (tiers want whole requests) and the backends' ``backend_traits``.

        Others are fields of ``RuntimeConfig``.
        """
        backend_traits = settings.pop("backend_traits", BackendTraits(1, 1))
        self.now = 0.0
        whole = settings.pop("whole", False)
        policy = settings.pop("policy", LRUPolicy)
        config = RuntimeConfig(
            slot_count=slots,
            block_bytes=16,
            tiers=tuple(
                TierConfig(
                    name=f"{n}:test",
                    type="test",
                    enable_kv_events=True,
                    offload_policy="request_level" if whole else "chunk_level",
                )
                for n in range(1, tiers + 1)
            ),
            **{"cascade_slots_fraction_max": 1.0, **settings},
        )
        traits = [(backend_traits, None)] * tiers
        self.runtime: TestRuntime = open_test_runtime(
            config, policy(slots), traits, clock=lambda: self.now
        )
        self.facade = self.runtime.facade

    def store(self, keys: list[bytes], request: str = "writer") -> None:
        """Store blocks as the GPU would, and let the cascades end well."""
        self.facade.on_request_started(request)
        grant = self.facade.prepare_store(keys, request)
        assert grant is not None
        self.facade.complete_store(grant.keys, request)
        self.facade.on_request_finished(request)
        self.answer_all()
        self.facade.step_end()

    def answer_all(self, outcome: Outcome = Outcome.DONE) -> list[Batch]:
        """Have the backends answer all that they were asked."""
        answered: list[Batch] = []
        self.runtime.cell.settle()
        for tier in self.runtime.tiers:
            while tier.batches:
                batch = tier.batches[0]
                tier.answer(batch, [outcome] * len(batch.keys))
                answered.append(batch)
                self.runtime.cell.settle()
        return answered

    def answer_batch(self, outcome: Outcome = Outcome.DONE) -> Batch:
        """Have the first tier's backend answer what it was asked first."""
        self.runtime.cell.settle()
        tier = self.runtime.tiers[0]
        batch = tier.batches[0]
        tier.answer(batch, [outcome] * len(batch.keys))
        self.runtime.cell.settle()
        return batch


def keys_of(count: int, prefix: bytes = b"k") -> list[bytes]:
    return [prefix + bytes([number]) + bytes(4) for number in range(count)]
