"""What a machine without a free core makes late is no fault of a tier."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtier.core import wire
from kvtier.core.block_state import BlockState
from kvtier.plugin_api.backend import BackendTraits, Outcome
from tests.unit.engine._story import (
    Story,
    counts_of,
    keys_of,
    story_of_a_tier,
    tier_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

PROBE_S = 1.0
LOAD_S = 10.0
ABSENT, FILLING, PROBING = BlockState.ABSENT, BlockState.FILLING, BlockState.PROBING


def breakers(story: Story) -> set[str]:
    return set(story.facade.statistics().tiers[0].breakers.values())


def steps_of_an_engine(story: Story, keys: list[bytes], seconds: float) -> Iterator[None]:
    """Let the engine compute for so long in each step; what the tier has done by then arrives."""
    story.facade.on_request_started("r")
    story.facade.lookup_states(keys, "r")
    story.facade.step_end()
    while story.facade.lookup_prefix(keys, "r") is None:
        story.runtime.cell.settle()
        for batch in tuple(tier_of(story).batches):
            tier_of(story).answer(batch, [Outcome.DONE] * len(batch.keys))
        story.now += seconds
        story.runtime.cell.settle()
        story.facade.lookup_states(keys, "r")
        story.facade.step_end()
        yield


def test_a_question_in_parts_is_not_late_since_the_engine_computes_for_seconds() -> None:
    """The second part is sent in the middle of a step, and no Tick has told the time since."""
    keys = [number.to_bytes(2, "big") + bytes(4) for number in range(600)]
    story = Story(slots=1200, backend_traits=BackendTraits(1, 1, probe_batch_blocks_max=512))
    for _ in steps_of_an_engine(story, keys, 1.5 * PROBE_S):
        assert breakers(story) == {"CLOSED"}
    assert counts_of(story).probes_timed_out == 0
    assert story.facade.lookup_prefix(keys, "r") == len(keys)


def test_a_load_in_parts_is_not_late_since_the_engine_computes_for_seconds() -> None:
    story, keys = story_of_a_tier(6, slots=24, job_blocks_max=1, jobs_in_flight_max=1)
    for _ in steps_of_an_engine(story, keys, 1.5 * LOAD_S):
        assert breakers(story) == {"CLOSED"}
    assert counts_of(story).jobs_timed_out == 0
    assert story.facade.lookup_prefix(keys, "r") == len(keys)


class BusyMachine:
    """A tier that was asked for a block, and answers when told to."""

    def __init__(self, **settings: object) -> None:
        self.story = Story(**settings)  # type: ignore[arg-type]
        self.facade = self.story.facade
        (self.key,) = keys_of(1)
        self.ask("r")

    def ask(self, request: str) -> None:
        self.facade.on_request_started(request)
        assert self.facade.lookup_state(self.key, request) is PROBING
        self.facade.step_end()
        self.story.runtime.cell.settle()

    def passes(self, seconds: float, *, not_run_s: float = 0.0) -> None:
        """Let time pass. The machine did not run the tier for some of it."""
        self.story.now += seconds
        if not_run_s:
            tier_of(self.story).inbox.post(wire.TierNotRun(not_run_s))
            self.story.runtime.cell.settle()
        self.facade.step_end()
        self.story.runtime.cell.settle()

    @property
    def breaker(self) -> str:
        return self.facade.statistics().tiers[0].breakers["probes"]


def test_nobody_waits_longer_since_a_tier_is_not_run() -> None:
    """Its answer comes too late for the request, says what is there, and is no failure."""
    busy = BusyMachine()
    for _ in range(8):
        busy.passes(PROBE_S / 4, not_run_s=PROBE_S / 4)
    assert busy.facade.lookup_state(busy.key, "r") is ABSENT
    assert counts_of(busy.story).probes_timed_out == 1
    assert busy.breaker == "CLOSED"
    busy.passes(20.0, not_run_s=20.0)
    busy.ask("others")  # are not kept from asking, nor is what they ask kept waiting
    assert busy.facade.statistics().tiers[0].probes_in_flight == 1
    busy.story.answer_all()
    busy.facade.on_request_started("next")
    assert busy.facade.lookup_state(busy.key, "next") is FILLING
    assert breakers(busy.story) == {"CLOSED"}
    assert counts_of(busy.story).breaker_opened == 0


def test_a_trial_whose_request_has_lost_patience_shows_that_the_tier_is_well() -> None:
    """It was forgotten, and nothing was tried again."""
    busy = BusyMachine(wait_timeout_s=0.6 * PROBE_S)
    busy.passes(PROBE_S)
    assert busy.breaker == "OPEN"
    busy.passes(1.0)
    assert busy.breaker == "HALF_OPEN"
    busy.ask("trial")
    busy.passes(0.7 * PROBE_S)
    assert busy.facade.lookup_state(busy.key, "trial") is ABSENT
    assert busy.breaker == "HALF_OPEN"
    busy.story.answer_all()
    assert busy.breaker == "CLOSED"
