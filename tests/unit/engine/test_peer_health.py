"""Peers of a request-scoped tier fail apart: one that is gone costs its own requests only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtier.core.block_state import BlockState
from kvtier.engine.link.circuit_breaker import Breaker, BreakerState, Work
from kvtier.engine.link.tier_health import PEERS_MAX, PeerHealth
from kvtier.plugin_api.backend import BackendTraits, Outcome
from tests.unit.engine._story import Story, link_of, tier_of

if TYPE_CHECKING:
    from tests.support.cell import Batch

DEAD, WELL = "10.0.0.7:5710", "10.0.0.8:5710"
PAUSE_S = 10.0
PARAMS = b"\x80"


def story_of_peers() -> Story:
    traits = BackendTraits(1 << 20, 1 << 20, request_scoped=True)
    return Story(slots=64, backend_traits=traits, breaker_pause_s=PAUSE_S)


def key_of(request: str) -> bytes:
    return request.encode().ljust(6)


def ask(story: Story, request: str, peer: str) -> bool:
    """Begin a request. True: its peer is asked for its block."""
    story.facade.on_request_started(request, params=PARAMS, peer=peer)
    story.facade.lookup_state(key_of(request), request)
    story.facade.step_end()
    return is_asked(story, request)


def is_asked(story: Story, request: str) -> bool:
    story.runtime.cell.settle()
    return bool(asked_for(story, request))


def asked_for(story: Story, request: str) -> list[Batch]:
    return [each for each in tier_of(story).batches if getattr(each, "request", "") == request]


def answer(story: Story, request: str, outcome: Outcome = Outcome.DONE) -> None:
    """Have the peer of a request end what it was asked for it."""
    (batch,) = asked_for(story, request)
    tier_of(story).answer(batch, [outcome] * len(batch.keys))
    story.runtime.cell.settle()


def load(story: Story, request: str, peer: str) -> bool:
    """Begin a request whose block is at its peer. True: it is loaded, and has not arrived."""
    if not ask(story, request, peer):
        return False
    answer(story, request)
    story.facade.lookup_state(key_of(request), request)
    story.facade.step_end()
    return is_asked(story, request)


def is_served(story: Story, request: str, peer: str) -> bool:
    """Tell whether a request is brought its block by its peer."""
    if load(story, request, peer):
        answer(story, request)
    state = story.facade.lookup_state(key_of(request), request)
    assert state in (BlockState.READY, BlockState.ABSENT)
    return state is BlockState.READY


def wait_for_loads(story: Story, seconds: float = 0.0) -> None:
    story.let_pass(seconds or link_of(story)._config.tiers[0].promote_timeout_s)


def several_hang(story: Story, *, another: str | None = None) -> None:
    """Have three peers end no load, one after the other; ``another`` ends one after each."""
    for number in range(3):
        assert breakers(story)[Work.LOAD] is BreakerState.CLOSED
        assert load(story, f"h{number}", f"10.0.0.{number}:5710")
        wait_for_loads(story)
        assert another is None or is_served(story, f"w{number}", another)


def breakers(story: Story) -> dict[Work, BreakerState]:
    return dict(link_of(story).audit().breakers)


def said(story: Story) -> list[tuple[str, str]]:
    return [(notice.event, notice.detail) for notice in story.runtime.cell.notices]


def test_a_peer_that_ends_no_load_is_left_alone_and_the_others_are_not() -> None:
    story = story_of_peers()
    assert load(story, "hangs", DEAD)
    wait_for_loads(story)
    assert set(breakers(story).values()) == {BreakerState.CLOSED}
    assert not is_served(story, "same", DEAD)
    assert is_served(story, "other", WELL)
    how = "completed none of its loads for too long: loads from it pause"
    assert said(story) == [("peer bypassed", f"{DEAD} {how}")]


def test_a_load_that_has_just_begun_is_not_late_because_another_peer_hangs() -> None:
    story = story_of_peers()
    assert load(story, "hangs", DEAD)
    limit_s = link_of(story)._config.tiers[0].promote_timeout_s
    wait_for_loads(story, limit_s * 0.9)
    assert load(story, "other", WELL)
    wait_for_loads(story, limit_s * 0.1)
    assert story.facade.lookup_state(key_of("hangs"), "hangs") is BlockState.ABSENT
    assert story.facade.lookup_state(key_of("other"), "other") is BlockState.FILLING
    answer(story, "other")
    assert story.facade.lookup_state(key_of("other"), "other") is BlockState.READY


def test_a_peer_that_answers_no_probe_is_left_alone_and_the_others_are_not() -> None:
    story = story_of_peers()
    assert ask(story, "hangs", DEAD)
    story.let_pass(link_of(story)._config.tiers[0].probe_timeout_s)
    assert set(breakers(story).values()) == {BreakerState.CLOSED}
    assert not ask(story, "same", DEAD)
    assert story.facade.lookup_state(key_of("same"), "same") is BlockState.ABSENT
    assert is_served(story, "other", WELL)


def test_loads_that_fail_count_against_their_peer() -> None:
    story = story_of_peers()
    for number in range(3):
        assert load(story, f"f{number}", DEAD)
        answer(story, f"f{number}", Outcome.FAILED)
        assert is_served(story, f"w{number}", WELL)
    assert not is_served(story, "same", DEAD)
    assert is_served(story, "other", WELL)
    assert set(breakers(story).values()) == {BreakerState.CLOSED}


def test_a_peer_is_tried_by_one_request_after_its_pause_and_is_back_with_a_success() -> None:
    story = story_of_peers()
    assert load(story, "hangs", DEAD)
    wait_for_loads(story)
    wait_for_loads(story, PAUSE_S)
    assert load(story, "tries", DEAD)
    assert not load(story, "behind", DEAD), "one is tried"
    answer(story, "tries")
    assert is_served(story, "later", DEAD)
    assert said(story)[1:] == [("peer is back", f"loads from {DEAD} resume")]


def test_a_trial_that_a_peer_fails_is_no_further_failure_of_the_tier() -> None:
    story = story_of_peers()
    assert load(story, "hangs", DEAD)
    wait_for_loads(story)
    for number in range(4):
        wait_for_loads(story, PAUSE_S * 2**number)
        assert load(story, f"t{number}", DEAD)
        answer(story, f"t{number}", Outcome.FAILED)
        assert not load(story, f"u{number}", DEAD)
    assert breakers(story)[Work.LOAD] is BreakerState.CLOSED
    assert len(said(story)) == 1, "it was not closed meanwhile"


def test_a_tier_is_left_alone_if_several_peers_fail_and_goes_on_with_one_of_them() -> None:
    story = story_of_peers()
    several_hang(story)
    assert breakers(story)[Work.LOAD] is BreakerState.OPEN
    assert not is_served(story, "other", WELL)
    wait_for_loads(story, PAUSE_S)
    assert is_served(story, "tries", WELL)
    assert is_served(story, "later", WELL)
    assert not said(story)[-1][1].startswith(WELL)
    assert said(story)[-2:] == [
        ("tier bypassed", "has several peers that fail: loads pause"),
        ("tier is back", "loads resume"),
    ]


def test_a_tier_that_works_for_another_peer_is_not_left_alone() -> None:
    story = story_of_peers()
    several_hang(story, another=WELL)
    assert is_served(story, "other", WELL)
    assert breakers(story)[Work.LOAD] is BreakerState.CLOSED


def test_a_trial_of_a_tier_that_a_peer_fails_is_no_return() -> None:
    story = story_of_peers()
    several_hang(story)
    wait_for_loads(story, PAUSE_S)
    assert load(story, "tries", WELL)
    answer(story, "tries", Outcome.FAILED)
    assert breakers(story)[Work.LOAD] is BreakerState.OPEN


def test_what_names_no_peer_fails_as_its_tier() -> None:
    story = story_of_peers()
    assert load(story, "hangs", "")
    wait_for_loads(story)
    assert breakers(story)[Work.LOAD] is BreakerState.OPEN
    assert not is_served(story, "other", WELL)


def test_few_peers_are_remembered_however_many_fail() -> None:
    """Addresses come with requests, from anybody."""
    peers = PeerHealth(lambda: Breaker(1, 1.0, 60.0))
    for number in range(PEERS_MAX + 1):
        assert peers.change(Work.LOAD, str(number), Breaker.failed, 0.0)
    assert peers.allows(Work.LOAD, "0")
    assert not peers.allows(Work.LOAD, "1")
    assert not peers.allows(Work.LOAD, str(PEERS_MAX))
    assert len(peers._failing) == PEERS_MAX


def test_a_peer_whose_trial_ended_without_a_result_is_tried_again() -> None:
    peers = PeerHealth(lambda: Breaker(1, 1.0, 60.0))
    peers.change(Work.PROBE, DEAD, Breaker.failed, 0.0)
    peers.pass_time(1.0)
    peers.on_sent(Work.PROBE, DEAD)
    assert not peers.allows(Work.PROBE, DEAD)
    peers.showed_nothing(Work.LOAD)
    assert not peers.allows(Work.PROBE, DEAD)
    peers.showed_nothing(Work.PROBE)
    assert peers.allows(Work.PROBE, DEAD)
