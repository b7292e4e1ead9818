"""Which blocks go on to a tier: gates and policies over real actors in the test cell."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings, strategies

from kvtier import ConfigError, RuntimeConfig, TierConfig
from kvtier.core.block_state import BlockState
from kvtier.plugin_api.admission_policy import AdmissionContext
from kvtier.plugin_api.backend import BackendTraits, Outcome
from kvtier.plugin_api.options import Options
from kvtier.policies.admission.predicted_reuse import BURST_S, DAY_S, PredictedReuseAdmission
from kvtier.policies.admission.second_touch import SecondTouchAdmission
from kvtier.policies.eviction.lru import LRUPolicy
from tests.support.cell import TestRuntime, open_test_runtime
from tests.support.examples import examples

if TYPE_CHECKING:
    from kvtier.settings.runtime_config import OffloadPolicy

KEYS = [bytes([code]) + bytes(4) for code in b"abcdef"]
CONTEXT = AdmissionContext(block_bytes=16, slot_count=8)


class Story:
    """A runtime with one tier, by default written to only on a block's second touch."""

    def __init__(self, tier: TierConfig | None = None, **options: object) -> None:
        if tier is None:
            tier = TierConfig("1:t", "t", admission="second_touch", admission_options=options)
        config = RuntimeConfig(
            slot_count=8,
            block_bytes=16,
            cascade_slots_fraction_max=1.0,
            tiers=(tier,),
            on_reset="keep",
        )
        self.runtime: TestRuntime = open_test_runtime(
            config, LRUPolicy(8), [(BackendTraits(1, 1), None)], clock=lambda: 0.0
        )
        self.facade = self.runtime.facade

    def serve(self, request: str, keys: list[bytes]) -> list[bytes]:
        """Serve a request; return what the tier was given to store meanwhile."""
        facade = self.facade
        facade.on_request_started(request)
        grant = facade.prepare_store(keys, request)
        assert grant is not None
        facade.complete_store(grant.keys, request)
        facade.on_request_finished(request, keys)
        stored: list[bytes] = []
        self.runtime.cell.settle()
        tier = self.runtime.tiers[0]
        while tier.batches:
            batch = tier.batches[0]
            stored += batch.keys
            tier.answer(batch, [Outcome.DONE] * len(batch.keys))
            self.runtime.cell.settle()
        facade.step_end()
        return stored


def test_a_block_is_written_when_a_second_request_has_used_it() -> None:
    story = Story()
    assert story.serve("first", KEYS[:3]) == []
    assert story.serve("second", KEYS[:2]) == KEYS[:2]
    assert story.serve("third", KEYS[:3]) == [KEYS[2]]
    assert story.facade.statistics().tiers[0].counts.cascades_refused == 3


@pytest.mark.parametrize("policy", ["chunk_level", "request_level"])
def test_a_tier_that_is_read_only_is_asked_and_given_nothing(policy: OffloadPolicy) -> None:
    story = Story(TierConfig("1:t", "t", read_only=True, offload_policy=policy))
    for request in ("first", "second"):
        assert story.serve(request, KEYS[:3]) == []
    seen = story.facade.statistics()
    assert (seen.primary.pinned_slots, seen.tiers[0].counts.cascades_refused) == (0, 0)
    story.facade.on_request_started("third")
    assert story.facade.lookup_state(KEYS[3], "third") is BlockState.PROBING


def test_nothing_stays_pinned_for_what_was_refused() -> None:
    story = Story()
    story.serve("first", KEYS[:3])
    seen = story.facade.statistics().primary
    assert (seen.pinned_slots, seen.ready_slots) == (0, 3)


def test_a_block_that_comes_back_from_the_gpu_was_written_once_and_is_again() -> None:
    story = Story()
    story.serve("first", KEYS[:1])
    assert story.serve("second", KEYS[:1]) == KEYS[:1]
    story.facade.reset()
    story.facade.on_reset_flushed()
    assert story.serve("third", KEYS[:1]) == KEYS[:1], "it was used twice before"


@pytest.mark.parametrize("how", ["raises", "is short"])
def test_a_policy_that_breaks_is_left_out_and_said_once(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To lose the policy must not be to lose blocks."""

    def admit(_self: object, _keys: object, _request: str) -> list[bool]:
        if how == "raises":
            raise ValueError("no")
        return []

    monkeypatch.setattr(SecondTouchAdmission, "admit", admit)
    story = Story()
    assert story.serve("first", KEYS[:2]) == KEYS[:2]
    assert story.serve("second", KEYS[2:4]) == KEYS[2:4]
    said = [note.event for note in story.runtime.cell.notices]
    assert said == ["admission policy broke"]
    assert story.facade.statistics().faults == 0


uses = strategies.lists(
    strategies.tuples(
        strategies.sampled_from(["admit", "end"]),
        strategies.sampled_from(["r1", "r2", "r3"]),
        strategies.lists(strategies.sampled_from(KEYS), min_size=1, max_size=4, unique=True),
    ),
    max_size=30,
)


@given(uses, strategies.integers(1, 4))
def test_second_touch_agrees_with_a_slow_obvious_model(
    history: list[tuple[str, str, list[bytes]]], remembered: int
) -> None:
    policy = SecondTouchAdmission(Options({"remembered_blocks_max": remembered}, "x"), CONTEXT)
    seen: list[tuple[bytes, str]] = []  # key and first user; "": a second one has come
    for what, request, keys in history:
        users = dict(seen)
        if what == "end":
            wanted = [key for key in keys if users.get(key, request) not in {request, ""}]
            assert policy.end_request(request, keys) == wanted
            continue
        expected = []
        for key in keys:
            first = users.get(key)
            seen = [each for each in seen if each[0] != key]
            is_second = first not in {None, request}
            seen.append((key, "" if is_second else request))
            expected.append(is_second)
        seen = seen[-remembered:]
        assert policy.admit(keys, request) == expected


def predicted(**options: object) -> PredictedReuseAdmission:
    return PredictedReuseAdmission(Options(options, "x"), CONTEXT)


def test_what_a_conversation_adds_is_worth_writing_once_conversations_have_gone_on() -> None:
    """One prompt in four begins a conversation, and each of those is continued."""
    policy = predicted(threshold=0.55, remembered_blocks_max=4_000)
    admitted: dict[str, list[bool]] = {"first": [], "next": []}
    for number in range(400):
        policy.pass_time(float(10 * number))
        head = number.to_bytes(4, "big")
        path = [head + bytes([i]) + bytes(4) for i in range(6)]
        first = f"first {number}"
        admitted["first"] += policy.admit(path[:3], first)[:1]
        policy.end_request(first, path[:3])
        if number % 4 == 0:
            for turn, size in ((1, 4), (2, 5), (3, 6)):
                policy.pass_time(float(10 * number + 2 * turn))
                following = f"turn {turn} of {number}"
                policy.touch(path[: size - 1], following)
                admitted["next"] += policy.admit(path[size - 1 : size], following)
                policy.end_request(following, path[:size])
    assert sum(admitted["first"][-40:]) < 5
    assert sum(admitted["next"][-40:]) > 20


@given(
    strategies.lists(
        strategies.tuples(strategies.floats(0.1, 5_000), strategies.integers(1, 40)), max_size=30
    ),
    strategies.integers(16, 40_000),
)
@settings(max_examples=examples(40))
def test_a_budget_of_written_bytes_is_kept(
    offers: list[tuple[float, int]], bytes_per_day: int
) -> None:
    """Whatever is offered when: no more than the budget so far, with what may be saved up."""
    policy = predicted(write_bytes_per_day_max=bytes_per_day, remembered_blocks_max=500)
    now, written, started = 100.0, 0, 0.0
    for number, (pause, size) in enumerate(offers):
        now += pause
        started = started or now
        policy.pass_time(now)
        keys = [number.to_bytes(4, "big") + bytes([i]) + bytes(4) for i in range(size)]
        written += CONTEXT.block_bytes * sum(policy.admit(keys, f"r{number}"))
        policy.end_request(f"r{number}", keys)
        assert written <= bytes_per_day * (now - started + BURST_S) / DAY_S + CONTEXT.block_bytes


def test_a_budget_and_a_threshold_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match=r"threshold=0.3 does not go together"):
        predicted(threshold=0.3, write_bytes_per_day_max=1_000)
    with pytest.raises(ConfigError, match=r"write_bytes_per_day_max=3 must be at least 16"):
        predicted(write_bytes_per_day_max=3)


def test_bad_options_are_refused_by_name() -> None:
    def config(admission: object) -> TierConfig:
        return TierConfig.from_mapping(1, {"type": "memory", "admission": admission})

    given_as_text = config("second_touch")
    assert (given_as_text.admission, given_as_text.admission_options) == ("second_touch", {})
    read = config({"policy": "second_touch", "remembered_blocks_max": 7})
    assert read.admission_options == {"remembered_blocks_max": 7}
    assert read.options == {}
    with pytest.raises(ConfigError, match=r"admission: policy is missing"):
        config({"remembered_blocks_max": 7})
    with pytest.raises(ConfigError, match=r"remembered_blocks_max=0 must be at least 1"):
        Story(remembered_blocks_max=0)
    with pytest.raises(ConfigError, match=r"unknown key 'remember'"):
        Story(remember=1)
