"""What offloading gave and cost, and why a request found no more of its prefix."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Final

import pytest
from _story import Story, keys_of, link_of, look_up, story_of_a_tier, tier_of

from kvtier.core import wire
from kvtier.core.statistics import PrimaryCounts, SourceCounts, TierCounts
from kvtier.engine.account.absences import Absences
from kvtier.engine.account.evictions import LARGEST, REMEMBERED_MAX, Evictions
from kvtier.engine.account.read_share import EVERY, ReadShare
from kvtier.engine.account.sources import Account
from kvtier.plugin_api.backend import BackendTraits, Outcome
from kvtier.tier.driver_messages import ContentsLost

if TYPE_CHECKING:
    from kvtier.core.statistics import AbsenceReason

BOUNDED: Final = BackendTraits(1, 1, capacity_blocks=8)
KEYS: Final = keys_of(4)


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
    story.now += 3600.0  # idle, so no step ended
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
        (Outcome.ABSENT, "gone"),
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


def test_a_block_that_left_its_tier_is_missed_for_the_reason_why_it_left() -> None:
    story, keys = story_of_a_tier(1, backend_traits=BOUNDED)
    miss(story, keys[0], "r")
    assert misses(story) == {(1, "evicted"): 1}, "eight others took its place"
    (other,) = keys_of(1, b"n")
    story.facade.discard([other])
    tier_of(story).mailbox.post(ContentsLost(keys=(other,)))
    story.step()
    miss(story, other, "s")
    assert misses(story) == {(1, "evicted"): 1, (1, "gone"): 1}


def miss(story: Story, key: bytes, request: str) -> None:
    """Ask for a block that the tier turns out not to have."""
    look_up(story, key, request)
    story.answer_all()
    assert story.facade.lookup_state(key, request).name == "ABSENT"


def test_a_block_that_a_tier_took_in_the_end_and_evicted_is_not_missed_as_never_admitted() -> None:
    account = Account(PrimaryCounts(), 4, tier_count=1)
    account.follow_evictions(0, 8)
    account.on_gone(KEYS[:1], 0, "not_admitted", 0.0)
    account.on_evicted(KEYS[:1], 1.0)
    account.on_miss(KEYS[0], None, 2.0)
    assert account.misses == [{}, {"not_admitted": 1}]
    account.on_tier_evicted(KEYS[:1], 0, 3.0)
    account.on_miss(KEYS[0], None, 4.0)
    assert account.misses == [{}, {"not_admitted": 1, "evicted": 1}]


def test_a_tier_that_restarts_with_another_capacity_is_estimated_by_that() -> None:
    account = Account(PrimaryCounts(), 4, tier_count=1)
    for capacity in (8, 8, 1):
        account.follow_evictions(0, capacity)
        account.on_tier_evicted(KEYS, 0, 1.0)
        account.on_miss(KEYS[0], None, 2.0)
    assert account.misses == [{"never_stored": 1}, {"evicted": 2}], "four times 1 are remembered"


def test_a_larger_tier_would_still_have_what_left_last() -> None:
    """Twelve blocks pass four slots and a tier of eight; the first four are computed again."""
    story = Story(slots=4, backend_traits=BOUNDED)
    for prefix in (b"a", b"b", b"c", b"a"):
        story.store(keys_of(4, prefix), f"writer {prefix!r}")
    assert source(story, 0).hits_if_twice == 0, "eight others came between"
    assert source(story, 0).hits_if_four_times == 4
    assert source(story, 1).hits_if_twice == source(story, 1).hits_if_four_times == 4


def test_a_larger_primary_tier_saves_loads_from_tiers_and_no_tier_saves_its_own() -> None:
    story, keys = story_of_a_tier(2, slots=4, backend_traits=BOUNDED)
    story.tell(wire.PresenceChanged((), tuple(keys), 0, for_room=True))
    story.tell(wire.PresenceChanged(tuple(keys), (), 0))
    story.facade.on_request_started("r")
    story.facade.lookup_prefix(keys, "r")
    story.step()
    assert source(story, 0).hits_if_twice == 2
    assert source(story, 1).hits_if_four_times == 0, "it has them"


@pytest.mark.parametrize("capacity", [8, 50])
def test_the_hits_of_larger_caches_are_exact_with_lru(capacity: int) -> None:
    counts = SourceCounts()
    evictions = Evictions(counts, capacity)
    caches = [_Lru(size) for size in (capacity, 2 * capacity, 4 * capacity)]
    rng = random.Random(capacity)
    for _ in range(4000):
        key = b"%d" % (rng.paretovariate(0.5) * 3)
        if key not in caches[0].blocks:
            evictions.on_miss([key])
        victims, *_ = [cache.use(key) for cache in caches]
        evictions.add(victims, 0.0)
    hits, of_twice, of_four_times = (cache.hits for cache in caches)
    assert counts.hits_if_twice == of_twice - hits > 0
    assert counts.hits_if_four_times == of_four_times - hits > of_twice - hits


class _Lru:
    """A cache of ``size`` blocks."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.blocks: dict[bytes, None] = {}
        self.hits = 0

    def use(self, key: bytes) -> list[bytes]:
        """Read a block; return what had to go."""
        self.hits += key in self.blocks
        self.blocks.pop(key, None)
        self.blocks[key] = None
        victims = list(self.blocks)[: -self.size]
        for victim in victims:
            del self.blocks[victim]
        return victims


def test_of_a_large_tier_a_sample_counts_for_all() -> None:
    counts = SourceCounts()
    evictions = Evictions(counts, 1 << 20)
    keys = [b"%d" % n for n in range(100_000)]
    for first in range(0, len(keys), 7):
        evictions.add(keys[first : first + 7], 0.0)
    evictions.on_miss(keys)
    assert abs(counts.hits_if_twice - len(keys)) <= evictions.weight
    for n in range(50):
        evictions.add([b"%d more %d" % (n, m) for m in range(100_000)], 0.0)
    assert len(evictions._gone) <= LARGEST * REMEMBERED_MAX


def test_a_large_engine_remembers_a_sample_that_counts_for_all() -> None:
    absences = Absences(1 << 20)
    keys = [b"%d" % n for n in range(100_000)]
    for first in range(0, len(keys), 7):
        absences.add(keys[first : first + 7], 1, "gone", 0.0)
    counted = sum(found.weight for key in keys if (found := absences.of(key)) is not None)
    assert abs(counted - len(keys)) <= absences._sample.every
    for n in range(100):
        absences.add([b"%d more %d" % (n, m) for m in range(100_000)], 1, "gone", 0.0)
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
