"""Whether requests load what tiers have or compute it, and how long they wait for it."""

from __future__ import annotations

from typing import TYPE_CHECKING
from unittest.mock import patch

import pytest

from kvtier.core.block_state import BlockState
from kvtier.core.messages import GroupKeys
from kvtier.engine.decide.reprobing import FIRST_S
from kvtier.engine.link.circuit_breaker import BreakerState
from kvtier.engine.primary.load_decisions import EXPLORED_BLOCKS_MAX, EXPLORING_SHARE
from kvtier.plugin_api.backend import Outcome
from tests.unit.engine._decided import (
    ABSENT,
    CHUNK,
    FILLING,
    LENGTH,
    PLACE,
    READY,
    SPEED,
    Decided,
)
from tests.unit.engine._story import keys_of

if TYPE_CHECKING:
    from collections.abc import Callable

# --- the decision ---


def test_a_tier_that_is_faster_than_computing_is_loaded_from() -> None:
    story = Decided(block_s=0.001)
    assert story.look_up() == [FILLING] * LENGTH
    assert story.counts.loads_decided == 1
    assert story.counts.blocks_recomputed == 0


def test_a_tier_that_is_slower_than_computing_is_not_asked_for_anything() -> None:
    """Nothing is allocated, evicted or probed for what is computed sooner."""
    story = Decided(block_s=0.1)
    evictions, queries = story.counts.evictions, story.tier.queries
    assert story.look_up() == [ABSENT]
    story.facade.step_end()
    assert story.facade.get_finished() == 0
    assert (story.counts.recomputes_decided, story.counts.blocks_recomputed) == (1, LENGTH)
    assert (story.counts.evictions, story.tier.queries) == (evictions, queries)


@pytest.mark.parametrize("end", [None, "scheduled", "reset"])
def test_a_decision_stands_while_the_request_waits_and_no_longer(end: str | None) -> None:
    story = Decided(block_s=0.1)
    assert story.look_up() == [ABSENT]
    story.facade.step_end()
    if end == "scheduled":  # and preempted
        story.facade.on_requests_scheduled(["r"])
    elif end == "reset":
        story.facade.reset()
    for _ in range(3):
        story.teach(0.0001)
    assert story.look_up(begins=False) == ([FILLING] * LENGTH if end else [ABSENT])
    assert (story.counts.recomputes_decided, story.counts.loads_decided) == (
        1,
        int(end is not None),
    )


@pytest.mark.parametrize("setting", [{"load_policy": "always"}, {"prefill_tokens_per_s": None}])
def test_nothing_is_decided_where_it_should_not_or_cannot_be(setting: dict[str, object]) -> None:
    """The speed of the engine is not known at first."""
    story = Decided(block_s=0.1, **setting)
    assert story.look_up() == [FILLING] * LENGTH
    assert not story.facade.decides_loads
    assert story.counts.loads_decided == 0


def test_the_speed_of_the_engine_is_learnt_from_its_steps() -> None:
    story = Decided(block_s=0.1, prefill_tokens_per_s=None)
    for tokens in (100, 200, 300, 400):
        story.facade.on_step_computed(tokens, 0, tokens / SPEED)
    assert story.look_up() == [ABSENT]
    assert story.counts.prefill_seconds > 0
    assert story.counts.prefill_expected_seconds == pytest.approx(
        story.counts.prefill_seconds, rel=0.1
    )


def test_what_is_in_the_primary_tier_is_used_whatever_tiers_do() -> None:
    """The head is READY, the rest is slow: the head is loaded, and nothing else is asked for."""
    story = Decided(block_s=0.1)
    story.facade.on_request_started("head")
    story.facade.lookup_states(story.keys[:5], "head")
    story.facade.step_end()
    for _ in range(5):  # so slow a tier is given one at a time
        story.pass_time(0.1)
        story.answer_batch()
        story.facade.step_end()
    story.end("head")
    assert story.look_up() == [READY] * 5 + [ABSENT]


def test_a_prefix_of_a_fast_and_a_slow_tier_is_cut_between_them() -> None:
    story = Decided(block_s=0.001, tiers=2)
    slow = story.runtime.engine.links[1]
    directory = story.runtime.primary._directory
    directory.learn(0, (), story.keys[10:])
    slow._loads.pacing._estimate.observe(8, 4.0, 0.0)
    slow._tell_cost()
    story.runtime.cell.settle()
    assert story.look_up() == [FILLING] * 10 + [ABSENT]
    assert story.counts.cuts_decided == 1


def test_blocks_that_another_request_brings_are_used_by_one_that_declined_them() -> None:
    story = Decided(block_s=0.1)
    assert story.look_up() == [ABSENT]
    story.facade.on_request_started("other")
    story.facade.lookup_states(story.keys, "other")  # without a place: it loads
    story.step()
    assert story.look_up(begins=False) == [READY] * LENGTH


def test_several_groups_take_the_same_decision() -> None:
    """What is behind the cut is nowhere, for as long as the request waits."""
    groups = [GroupKeys(tuple(keys_of(LENGTH)), tuple(range(CHUNK, 10 * LENGTH + 1, CHUNK)))]
    for block_s, expected in ((0.001, LENGTH * CHUNK), (0.1, 0)):
        story = Decided(block_s)
        story.facade.on_request_started("r")
        assert [story.facade.survey(key, "r") for key in story.keys] == [FILLING] * LENGTH
        assert story.facade.reserve_prefix(groups, "r", 0) == expected
        story.facade.step_end()
        assert story.facade.survey(story.keys[0], "r") is (FILLING if expected else ABSENT)


# --- patience ---


@pytest.mark.parametrize("block_s", [0.001, None])
def test_a_request_waits_no_longer_than_computing_takes(block_s: float | None) -> None:
    """A tier that stalls costs what computing costs once more, and not the whole deadline.

    So does one of which nothing is known (None): it may hang from the start.
    """
    story = Decided(block_s)
    assert story.look_up() == [FILLING] * LENGTH
    story.facade.step_end()
    for seconds, expected in (
        (LENGTH * CHUNK / SPEED - 0.01, [FILLING] * LENGTH),
        (0.02, [ABSENT]),
    ):
        story.let_pass(seconds)
        assert story.look_up(begins=False) == expected
    assert (story.tier.loads_abandoned, story.tier.jobs_timed_out) == (LENGTH, 0)
    story.end()
    assert story.look_up("next") == [ABSENT], "the next request waits for it again"


def test_a_load_that_was_cut_is_no_failure_of_its_tier_until_it_is_late() -> None:
    story = Decided(block_s=0.001, breaker_failures_max=1)
    link = story.runtime.engine.links[0]
    story.look_up()
    story.facade.step_end()
    story.let_pass(1.0)
    assert story.tier.loads_abandoned == LENGTH
    assert link.audit().breaker is BreakerState.CLOSED
    story.let_pass(10.0)
    assert story.tier.jobs_timed_out == 1
    assert link.audit().breaker is BreakerState.OPEN
    story.let_pass(10.0)
    assert story.tier.jobs_timed_out == 1


@pytest.mark.parametrize(
    ("outcome", "then"),
    [(Outcome.DONE, BreakerState.CLOSED), (Outcome.FAILED, BreakerState.OPEN)],
)
def test_the_end_of_a_load_that_was_cut_is_its_tiers(outcome: Outcome, then: BreakerState) -> None:
    """Else a trial that was cut would leave a breaker half-open for ever."""
    story = Decided(block_s=0.001, breaker_failures_max=1)
    story.look_up()
    story.facade.step_end()
    story.runtime.cell.settle()
    story.now += 1.0
    story.step(outcome)
    story.facade.step_end()
    assert story.runtime.engine.links[0].audit().breaker is then
    assert story.tier.late_completions == 1
    assert story.facade.statistics().primary.quarantined_slots == 0


def test_blocks_that_arrived_before_the_cut_are_used() -> None:
    story = Decided(block_s=0.001, job_blocks_max=8)
    story.look_up()
    story.facade.step_end()
    story.runtime.cell.settle()
    arrived = len(story.answer_batch().keys)
    story.let_pass(1.0)
    assert 0 < arrived < LENGTH
    assert story.look_up(begins=False) == [READY] * arrived + [ABSENT]


def test_a_request_that_was_not_decided_for_waits_until_the_deadline() -> None:
    story = Decided(block_s=None, prefill_tokens_per_s=None)
    story.look_up()
    story.facade.step_end()
    story.let_pass(9.9)
    assert story.look_up(begins=False) == [FILLING] * LENGTH
    assert story.tier.loads_abandoned == 0


def test_who_loads_nothing_waits_for_what_has_left_the_primary_tier_since() -> None:
    """Else its load is given up in the step that begins it, and read for nothing."""
    story = Decided(block_s=0.1)
    head, rest = story.keys[:4], story.keys[4:]
    story.store(head, "head")
    assert story.look_up() == [READY] * len(head) + [ABSENT]
    story.facade.step_end()
    story.store(keys_of(128, b"more"), "more")
    assert [story.facade.lookup_state(key, "r") for key in head] == [FILLING] * len(head)
    story.facade.step_end()
    story.let_pass(0.001)
    assert story.tier.loads_abandoned == 0
    story.answer_all()
    assert story.look_up(begins=False) == [READY] * len(head) + [ABSENT]
    assert story.counts.recomputes_decided == 1
    assert story.counts.blocks_recomputed == len(rest)


# --- exploring ---


def explore(story: Decided) -> list[BlockState]:
    story.decline()
    story.let_pass(FIRST_S)
    return story.look_up("explores")


def test_a_tier_that_is_declined_is_tried_with_a_few_blocks_now_and_then() -> None:
    story = Decided(block_s=0.1)
    assert explore(story) == [FILLING] * EXPLORED_BLOCKS_MAX + [ABSENT]
    assert story.counts.explorations_decided == 1
    story.end("explores")
    story.decline(1.9 * FIRST_S)


def test_who_explores_waits_only_for_a_small_share_of_what_it_computes_anyway() -> None:
    story = Decided(block_s=0.1)
    explore(story)
    story.facade.step_end()
    story.let_pass(EXPLORING_SHARE * LENGTH * CHUNK / SPEED + 1e-4)
    assert story.look_up("explores", begins=False) == [ABSENT]
    assert story.tier.loads_abandoned == EXPLORED_BLOCKS_MAX


@pytest.mark.parametrize("interval_s", [0.0, FIRST_S])
def test_a_tier_that_has_become_fast_is_noticed_within_ten_requests(interval_s: float) -> None:
    """However fast they come: many an engine serves ten in the second before the first try."""
    story = Decided(block_s=0.1)
    story.decline()
    for number in range(10):
        story.let_pass(interval_s * 2**number)
        states = story.look_up(f"r{number}")
        if len(states) == LENGTH:
            break
        story.facade.step_end()
        story.runtime.cell.settle()
        story.now += 0.001
        story.answer_all()
        story.end(f"r{number}")
        story.forget()
    assert states == [FILLING] * LENGTH
    assert story.counts.explorations_decided <= 4


def test_a_change_of_mind_is_logged_once() -> None:
    story = Decided(block_s=0.1)
    for _ in range(4):
        story.decline(LENGTH * CHUNK / SPEED)
    notices = [each for each in story.runtime.cell.notices if "recomputed" in each.event]
    assert [each.tier for each in notices] == ["1:test"]


# --- waiting, by what is known when the load begins to wait ---


def test_a_request_waits_longer_for_a_load_that_others_went_before() -> None:
    """It was decided when it knew of none: its load should take 0.3 s now, twice 0.24 s at most."""
    story = Decided(block_s=0.005)
    assert story.look_up() == [FILLING] * LENGTH
    link = story.runtime.engine.links[0]
    behind = link._loads.cost(36)
    assert behind is not None
    assert behind.seconds(LENGTH) == pytest.approx(0.3)
    assert behind.patience_s(LENGTH, 0.24, 0.48) == pytest.approx(
        min(0.48, 0.3 * (1 + 3 * behind.spread))
    )
    assert behind.patience_s(LENGTH, 0.1, 0.2) == 0.1, "it is not expected in time"
    assert behind.patience_s(LENGTH, 1.0, 2.0) == 1.0
    assert behind.patience_s(LENGTH, 0.01, 0.01) == 0.01, "exploring"


def test_what_is_nowhere_is_computed_and_nothing_is_decided_before_that_is_known() -> None:
    story = Decided(block_s=0.001)
    cold = keys_of(LENGTH, b"x")
    story.facade.on_request_started("cold")
    probing = [BlockState.PROBING] * LENGTH
    assert story.facade.lookup_states(cold, "cold", PLACE) == probing
    assert story.counts.loads_decided == 0
    story.step(Outcome.ABSENT)
    assert story.facade.lookup_states(cold, "cold", PLACE) == [ABSENT]
    assert story.counts.loads_decided == 0


def test_a_prompt_that_nobody_knows_of_is_not_gone_through_to_decide_nothing() -> None:
    """As most prompts are, in each step until tiers have said so."""
    story = Decided(block_s=0.001)
    story.facade.on_request_started("cold")
    directory = story.runtime.primary._directory
    with patch.object(directory, "seen_at", wraps=directory.seen_at) as seen_at:
        story.facade.lookup_states(keys_of(LENGTH, b"x"), "cold", PLACE)
    assert seen_at.call_count == 1


def test_a_slow_tier_is_not_even_asked() -> None:
    story = Decided(block_s=0.1)
    story.facade.on_request_started("cold")
    assert story.facade.lookup_states(keys_of(LENGTH, b"x"), "cold", PLACE) == [ABSENT]


# --- how long a load takes ---


def seconds_known(at: Callable[[float, int], float]) -> float:
    """Have eight blocks loaded, and the engine look 5 s later; return what that should take now.

    ``at``: when the tier says that it ended a batch, by when it was asked and which one it is.
    """
    story = Decided(block_s=None)
    story.facade.on_request_started("taught")
    story.facade.lookup_states(story.taught[:8], "taught")
    story.facade.step_end()
    story.runtime.cell.settle()
    tier = story.runtime.tiers[0]
    for number, batch in enumerate(list(tier.batches), 1):
        tier.answer(batch, [Outcome.DONE] * len(batch.keys), at=at(story.now, number))
    story.runtime.cell.settle()
    story.let_pass(5.0)
    story.facade.step_end()
    known = story.runtime.engine.links[0]._loads.cost(0)
    assert known is not None
    return known.seconds(8)


def test_a_load_takes_until_its_tier_has_ended_it_and_not_until_the_engine_looks() -> None:
    """An engine that computes a long step looks late; else loads would seem slow, and lose."""
    assert seconds_known(lambda now, number: now + 0.01 * number) < 0.2


@pytest.mark.parametrize("at", [0.0, -1.0, 1e9, float("inf"), float("nan")])
def test_a_time_that_cannot_be_true_is_not_believed(at: float) -> None:
    """A clock of another machine, or none: then it is when the engine looks."""
    assert seconds_known(lambda _now, _number: at) == pytest.approx(5.0, rel=0.1)
