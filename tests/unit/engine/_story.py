"""What the tests of the facade's promises share: a runtime in the test cell, and its tiers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvtier import RuntimeConfig, TierConfig
from kvtier.core import wire
from kvtier.core.block_state import BlockState
from kvtier.plugin_api.backend import BackendTraits, Outcome
from kvtier.policies.eviction.lru import LRUPolicy
from tests.support.cell import Batch, TestRuntime, open_test_runtime

if TYPE_CHECKING:
    from kvtier.core.messages import StoreGrant
    from kvtier.core.statistics import PrimaryStatistics, TierCounts
    from kvtier.core.wire import Message
    from kvtier.engine.link.tier_link import TierLink
    from tests.support.cell import TestTier


class Story:
    """A runtime with eight slots, and one shared tier unless told otherwise."""

    def __init__(self, *, slots: int = 8, tiers: int = 1, **settings: Any) -> None:
        """``policy``, ``whole`` (tiers want whole requests) and the backends' ``backend_traits``.

        ``tier``: fields of each ``TierConfig``. ``tier_policy``: of tiers with a capacity.
        Others are fields of ``RuntimeConfig``.
        """
        traits: BackendTraits = settings.pop("backend_traits", BackendTraits(1, 1))
        self.now = 0.0
        tier = settings.pop("tier", {})
        if settings.pop("whole", False):
            tier = {"offload_policy": "request_level"}
        policy = settings.pop("policy", LRUPolicy)
        tier_policy = settings.pop("tier_policy", LRUPolicy)
        config = RuntimeConfig(
            slot_count=slots,
            block_bytes=16,
            tiers=tuple(
                TierConfig(name=f"{n}:test", type="test", enable_kv_events=True, **tier)
                for n in range(1, tiers + 1)
            ),
            **{"cascade_slots_fraction_max": 1.0, **settings},
        )
        capacity = traits.capacity_blocks
        held = [(traits, tier_policy(capacity) if capacity else None) for _ in range(tiers)]
        self.runtime: TestRuntime = open_test_runtime(
            config, policy(slots), held, clock=lambda: self.now
        )
        self.facade = self.runtime.facade

    @property
    def primary(self) -> PrimaryStatistics:
        """What the primary tier shows of itself now."""
        return self.facade.statistics().primary

    def grant(self, keys: list[bytes], request: str = "w", **given: Any) -> StoreGrant:
        """Have the GPU begin to store blocks: there is room for one at least."""
        grant = self.facade.prepare_store(keys, request, **given)
        assert grant is not None
        return grant

    def store(self, keys: list[bytes], request: str = "writer") -> None:
        """Store blocks as the GPU would, and let the cascades end well."""
        cascade(self, keys, request)
        self.facade.on_request_finished(request)
        self.answer_all()
        self.facade.step_end()

    def forget(self) -> None:
        """Empty host memory. Tiers keep what was stored, given ``on_reset="keep"``."""
        self.facade.reset()
        self.facade.on_reset_flushed()

    def step(self, outcome: Outcome = Outcome.DONE) -> list[Batch]:
        """End a step, and have the backends answer what it has asked them."""
        self.facade.step_end()
        return self.answer_all(outcome)

    def let_pass(self, seconds: float) -> None:
        """Let time pass, and end a step."""
        self.now += seconds
        self.facade.step_end()

    def tell(self, *messages: Message) -> None:
        """Have the first tier say something."""
        for message in messages:
            self.runtime.tiers[0].inbox.post(message)
        self.runtime.cell.settle()

    def restart(self, *meanwhile: Message, traits: BackendTraits | None = None) -> None:
        """Have the first tier break, and a new cell serve it."""
        self.tell(
            wire.TierBroke(reason="x"),
            wire.TierFenced(),
            *meanwhile,
            wire.TierRestarted(traits),
        )

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

    def pass_time(self, seconds: float) -> None:
        """Let time pass in steps of the engine, of 20 ms: a link looks as often."""
        started, steps = self.now, max(1, round(seconds / 0.02))
        for step in range(1, steps + 1):
            self.now = started + seconds * step / steps
            self.facade.step_end()

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


def link_of(story: Story) -> TierLink:
    return story.runtime.engine.links[0]


def tier_of(story: Story) -> TestTier:
    return story.runtime.tiers[0]


def counts_of(story: Story) -> TierCounts:
    return story.facade.statistics().tiers[0].counts


def cascade(story: Story, keys: list[bytes], request: str = "w") -> None:
    """Have the GPU store blocks; what the tier makes of them is open."""
    story.facade.on_request_started(request)
    story.facade.complete_store(story.grant(keys, request).keys, request)


def look_up(story: Story, key: bytes, request: str = "r") -> BlockState:
    """Begin a request, which asks for a block in a step; return what it is told of it."""
    story.facade.on_request_started(request)
    state = story.facade.lookup_state(key, request)
    story.facade.step_end()
    return state


def promote(story: Story, key: bytes, request: str = "r") -> None:
    """Have a tier be asked to load a block that it has."""
    assert look_up(story, key, request) is BlockState.FILLING


def story_of_a_tier(count: int = 1, **settings: object) -> tuple[Story, list[bytes]]:
    """Return a runtime whose tier alone has some blocks."""
    story = Story(**{"slots": 8, **settings})  # type: ignore[arg-type]
    keys = keys_of(count)
    story.store(keys)
    story.store(keys_of(story.runtime.primary.slots.count, b"n"), "other")
    return story, keys


def pending(story: Story) -> Batch:
    """Return what the tier's backend was asked."""
    story.runtime.cell.settle()
    (batch,) = tier_of(story).batches
    return batch
