"""Which blocks go on to a tier: gates and policies over real actors in the test cell."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given, strategies

from kvtier import ConfigError, TierConfig
from kvtier.core import wire
from kvtier.core.block_state import BlockState
from kvtier.plugin_api.admission_policy import AdmissionContext
from kvtier.plugin_api.backend import BackendTraits, Outcome
from kvtier.plugin_api.options import Options
from kvtier.policies.admission.second_touch import SecondTouchAdmission
from tests.unit.engine._story import Story, cascade, counts_of, look_up

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvtier.settings.runtime_config import OffloadPolicy

KEYS = [bytes([code]) + bytes(4) for code in b"abcdef"]
CONTEXT = AdmissionContext(block_bytes=16, slot_count=8)


def story_of_second_touch(capacity: int | None = None, **options: object) -> Story:
    """Return a runtime with one tier, which is written to on a block's second touch only."""
    tier = {"admission": "second_touch", "admission_options": options}
    return Story(tier=tier, backend_traits=BackendTraits(1, 1, capacity), on_reset="keep")


def serve(story: Story, request: str, keys: list[bytes]) -> list[bytes]:
    """Serve a request; return what the tier was given to store meanwhile."""
    cascade(story, keys, request)
    story.facade.on_request_finished(request, keys)
    stored = [key for batch in story.answer_all() for key in batch.keys]
    story.facade.step_end()
    return stored


@pytest.mark.parametrize("capacity", [None, 8])
def test_a_block_is_written_when_a_second_request_has_used_it(capacity: int | None) -> None:
    story = story_of_second_touch(capacity)
    assert serve(story, "first", KEYS[:3]) == []
    assert (story.primary.pinned_slots, story.primary.ready_slots) == (0, 3)
    assert serve(story, "second", KEYS[:2]) == KEYS[:2]
    assert serve(story, "third", KEYS[:3]) == [KEYS[2]]
    assert counts_of(story).cascades_refused == 3


@pytest.mark.parametrize(
    ("requests", "reported", "missed"),
    [
        (1, False, (1, "not_admitted")),
        (2, True, (1, "gone")),
        (2, False, (0, "evicted")),
    ],
)
def test_a_block_that_was_admitted_in_the_end_is_not_missed_for_its_refusal(
    requests: int, reported: bool, missed: tuple[int, str]
) -> None:
    """It was evicted from both; a tier reports that, or is asked for the block and has none."""
    story = story_of_second_touch()
    for request in range(requests):
        serve(story, str(request), KEYS[:1])
    serve(story, "other", [bytes([code]) + bytes(4) for code in range(8)])
    if reported:
        story.tell(wire.PresenceChanged((), tuple(KEYS[:1])))
    story.tell(wire.TierFenced(), wire.TierRestarted())  # what it has is not known any more
    assert look_up(story, KEYS[0]) is BlockState.PROBING
    story.answer_all(Outcome.ABSENT)
    assert story.facade.lookup_state(KEYS[0], "r") is BlockState.ABSENT
    misses = story.primary.misses
    assert {(n, why): count for n, of in enumerate(misses) for why, count in of.items()} == {
        missed: 1
    }


def test_a_block_that_another_engine_wrote_is_missed_for_what_its_load_met() -> None:
    story = story_of_second_touch()
    serve(story, "first", KEYS[:1])
    serve(story, "other", [bytes([code]) + bytes(4) for code in range(8)])
    assert look_up(story, KEYS[0]) is BlockState.PROBING
    story.answer_batch()
    assert story.facade.lookup_state(KEYS[0], "r") is BlockState.FILLING
    story.step(Outcome.FAILED)
    assert story.facade.lookup_state(KEYS[0], "r") is BlockState.ABSENT
    assert story.primary.misses == ({}, {"load_failed": 1})


@pytest.mark.parametrize("policy", ["chunk_level", "request_level"])
def test_a_tier_that_is_read_only_is_asked_and_given_nothing(policy: OffloadPolicy) -> None:
    story = Story(tier={"read_only": True, "offload_policy": policy})
    for request in ("first", "second"):
        assert serve(story, request, KEYS[:3]) == []
    assert (story.primary.pinned_slots, counts_of(story).cascades_refused) == (0, 0)
    story.facade.on_request_started("third")
    assert story.facade.lookup_state(KEYS[3], "third") is BlockState.PROBING


def test_a_block_that_comes_back_from_the_gpu_was_written_once_and_is_again() -> None:
    story = story_of_second_touch()
    serve(story, "first", KEYS[:1])
    assert serve(story, "second", KEYS[:1]) == KEYS[:1]
    story.forget()
    assert serve(story, "third", KEYS[:1]) == KEYS[:1], "it was used twice before"


def _raise() -> list[bool]:
    raise ValueError("no")


@pytest.mark.parametrize("admit", [_raise, list, int, lambda: (_raise() for _ in "k")])
def test_a_policy_that_breaks_is_left_out_and_said_once(
    admit: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To lose the policy must not be to lose blocks, nor the slots that they are read from."""
    monkeypatch.setattr(SecondTouchAdmission, "admit", lambda *_: admit())
    story = story_of_second_touch()
    assert serve(story, "first", KEYS[:2]) == KEYS[:2]
    assert serve(story, "second", KEYS[2:4]) == KEYS[2:4]
    said = [note.event for note in story.runtime.cell.notices]
    assert said == ["admission policy broke"]
    assert story.facade.statistics().faults == 0


def test_a_policy_learns_what_a_request_goes_on_from_and_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """None of ours needs either, but one that predicts does, as others may write it."""
    learnt: list[object] = []

    def touch(_self: object, keys: Sequence[bytes], request: str) -> None:
        learnt.append((request, list(keys)))

    monkeypatch.setattr(SecondTouchAdmission, "touch", touch)
    monkeypatch.setattr(SecondTouchAdmission, "pass_time", lambda _self, now: learnt.append(now))
    story = story_of_second_touch()
    serve(story, "first", KEYS[:2])
    learnt.clear()
    story.now = 1.5
    story.facade.on_request_started("second")
    assert story.facade.lookup_prefix(KEYS[:2], "second") == 2
    story.facade.prepare_load(KEYS[:2], "second")
    story.facade.complete_load(KEYS[:2], "second")
    story.facade.step_end()
    assert learnt == [("second", KEYS[:2]), 1.5]


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
        story_of_second_touch(remembered_blocks_max=0)
    with pytest.raises(ConfigError, match=r"unknown key 'remember'"):
        story_of_second_touch(remember=1)
