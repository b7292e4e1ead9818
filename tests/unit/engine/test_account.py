"""What offloading gave and cost, and why a request found no more of its prefix."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from _story import Story, keys_of, link_of, look_up, story_of_a_tier

from kvtier.core.statistics import SourceCounts, TierCounts
from kvtier.engine.account.absences import Absences
from kvtier.engine.account.read_share import EVERY, ReadShare
from kvtier.plugin_api.backend import Outcome

if TYPE_CHECKING:
    from kvtier.core.statistics import AbsenceReason


def source(story: Story, number: int) -> SourceCounts:
    return story.primary.sources[number]


def misses(story: Story) -> dict[tuple[int, str], int]:
    """Return how often which reason is counted of which source."""
    counted = story.primary.misses
    return {(n, reason): count for n, each in enumerate(counted) for reason, count in each.items()}


def load(story: Story, keys: list[bytes], tokens: tuple[int, int], request: str = "r") -> None:
    assert story.facade.lookup_prefix(keys, request) == len(keys)
    story.facade.prepare_load(keys, request, tokens=tokens)
    story.facade.complete_load(keys, request)
    story.facade.on_requests_scheduled([request])


def test_loaded_tokens_count_where_their_blocks_were() -> None:
    """Three of four blocks come from the tier; the first was still in host memory."""
    story, keys = story_of_a_tier(4, on_reset="keep")
    story.forget()
    story.facade.on_request_started("w")
    story.grant(keys[:1])
    story.facade.complete_store(keys[:1], "w")
    story.facade.on_request_started("r")
    assert story.facade.lookup_prefix(keys, "r") is None
    story.step()
    load(story, keys, (0, 64))
    assert source(story, 0).loaded_tokens == 16
    assert source(story, 1).loaded_tokens == 48
    story.facade.on_request_started("r2")
    load(story, keys, (0, 64), "r2")
    assert source(story, 0).loaded_tokens == 16 + 64, "they are in host memory now"


def test_a_request_that_waited_for_a_tier_says_how_long() -> None:
    story, keys = story_of_a_tier(2, on_reset="keep")
    story.forget()
    story.step()
    story.facade.on_request_started("r")
    assert story.facade.lookup_prefix(keys, "r") is None
    story.now += 0.5
    story.step()
    load(story, keys, (0, 32))
    assert story.facade.drain_observations().wait_seconds == [0.5]


def test_a_block_that_was_loaded_and_never_read_is_wasted() -> None:
    story, keys = story_of_a_tier(4, slots=4, on_reset="keep")
    story.forget()
    story.facade.on_request_started("r")
    story.facade.lookup_prefix(keys[:2], "r")
    story.step()
    story.facade.on_request_finished("r")
    story.facade.on_request_started("w")
    story.grant(keys_of(4, b"new"))
    assert source(story, 1).wasted_blocks == 2


def test_why_a_prefix_ends_is_counted_once_a_wait() -> None:
    story = Story(slots=4, tiers=0)
    story.store(keys_of(4))
    story.facade.on_request_started("r")
    for _ in range(3):
        assert story.facade.lookup_prefix(keys_of(1, b"new"), "r") == 0
        story.facade.step_end()
    assert misses(story) == {(0, "never_stored"): 1}
    story.now += 30
    story.facade.on_request_started("w")
    story.grant(keys_of(4, b"new"), "w")
    story.now += 60
    story.facade.step_end()
    story.facade.on_request_started("s")
    assert look_up(story, keys_of(1)[0], "s").name == "ABSENT"
    assert misses(story) == {(0, "never_stored"): 1, (0, "evicted"): 1}
    ((number, age),) = story.facade.drain_observations().absent_seconds
    assert (number, age >= 60) == (0, True)


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [
        (Outcome.DAMAGED, "damaged"),
        (Outcome.ABSENT, "load_failed"),
        (Outcome.FAILED, "load_failed"),
    ],
)
def test_a_block_that_a_tier_did_not_deliver_is_missed_for_that(
    outcome: Outcome, reason: AbsenceReason
) -> None:
    story, keys = story_of_a_tier(1, on_reset="keep")
    story.forget()
    story.facade.on_request_started("r")
    story.facade.lookup_prefix(keys, "r")
    story.step(outcome)
    assert story.facade.lookup_prefix(keys, "r") == 0
    assert misses(story) == {(1, reason): 1}


def test_a_block_that_only_a_disabled_tier_may_have_is_missed_for_that() -> None:
    story, keys = story_of_a_tier(1, on_reset="keep")
    story.forget()
    link_of(story)._health.broke()
    link_of(story)._health.tell_usable()
    story.facade.step_end()
    story.facade.on_request_started("r")
    assert story.facade.lookup_prefix(keys, "r") == 0
    assert misses(story) == {(1, "tier_down"): 1}


def test_a_large_engine_remembers_a_sample_that_counts_for_all() -> None:
    absences = Absences(1 << 20)
    keys = [b"%d" % n for n in range(100_000)]
    for first in range(0, len(keys), 7):
        absences.add(keys[first : first + 7], 0, "evicted", 0.0)
    counted = sum(found.weight for key in keys if (found := absences.of(key)) is not None)
    assert abs(counted - len(keys)) <= absences._sample.every
    for n in range(100):
        absences.add([b"%d more %d" % (n, m) for m in range(100_000)], 0, "evicted", 0.0)
    assert len(absences._of) == absences._keys_max


def test_of_a_sample_of_written_blocks_those_that_were_read_are_counted_once() -> None:
    counts = TierCounts()
    share = ReadShare(counts)
    keys = [b"%d" % n for n in range(10 * EVERY)]
    for first in range(0, len(keys), 5):
        share.on_stored(keys[first : first + 5])
    assert counts.sampled_stores == 10
    for _ in range(2):
        share.on_loaded(keys[: 5 * EVERY])
    assert counts.sampled_reads == 5
