"""A tier whose backend needs a server: what its link does while there is none, and after."""

from __future__ import annotations

import pytest

from kvtier.core import wire
from kvtier.core.block_state import BlockState
from kvtier.core.events import EventKind
from kvtier.engine.link.circuit_breaker import BreakerState
from kvtier.engine.link.presence_feed import FadingPresence
from kvtier.engine.link.tier_health import LASTING_S, STEADY_S
from kvtier.plugin_api.backend import BackendTraits, Connection, Outcome
from tests.unit.engine._story import Story, cascade, keys_of, link_of, look_up, story_of_a_tier

CONNECTING, UP, GONE = Connection.CONNECTING, Connection.UP, Connection.GONE


def report(story: Story, state: Connection) -> None:
    """Have the backend report how it stands with its server."""
    story.tell(wire.ConnectionChanged(state))


def story_with_a_stored_block(**settings: object) -> tuple[Story, bytes]:
    """Return a runtime whose tier alone has a block, which it has told of."""
    story, (key,) = story_of_a_tier(**{"slots": 4, **settings})
    story.facade.take_events()
    return story, key


@pytest.mark.parametrize("state", [CONNECTING, GONE])
def test_no_request_waits_for_a_tier_without_its_server(state: Connection) -> None:
    story, key = story_with_a_stored_block()
    report(story, state)
    assert look_up(story, key) is BlockState.ABSENT
    assert link_of(story).in_flight() == (0, 0, 0)


def test_a_request_that_waits_when_the_server_is_lost_waits_no_longer() -> None:
    """A late answer of that server is counted and ignored."""
    story = Story()
    (key,) = keys_of(1)
    assert look_up(story, key) is BlockState.PROBING
    story.runtime.cell.settle()
    report(story, GONE)
    assert story.facade.lookup_state(key, "r") is BlockState.ABSENT
    story.answer_all()
    assert link_of(story).counts.late_completions == 1
    assert story.facade.lookup_state(key, "r") is BlockState.ABSENT


def test_nothing_is_stored_in_a_tier_without_its_server() -> None:
    story = Story()
    report(story, GONE)
    story.store(keys_of(2))
    assert story.runtime.tiers[0].batches == []
    assert link_of(story).counts.stores_deferred == 2
    assert story.primary.pinned_slots == 0


def test_what_a_server_had_is_asked_for_again_once_it_is_back() -> None:
    """It may have been begun anew, with nothing in it. Routers hear of it meanwhile."""
    story, key = story_with_a_stored_block()
    report(story, GONE)
    assert [each.kind for each in story.facade.take_events()] == [EventKind.CLEARED]
    report(story, UP)
    assert look_up(story, key) is BlockState.PROBING
    story.answer_all()
    assert [each.kind for each in story.facade.take_events()] == [EventKind.STORED]


def test_a_store_that_ends_without_a_server_is_no_promise_of_what_is_there() -> None:
    story = Story(slots=4)
    cascade(story, keys_of(1))
    story.runtime.cell.settle()
    report(story, GONE)
    story.answer_all()
    assert story.runtime.primary.audit().directory.known == {}


def test_a_tier_of_a_known_content_keeps_it_while_its_server_is_gone() -> None:
    """It has a capacity: the tier knows what is there, and says what it loses."""
    story, key = story_with_a_stored_block()
    link_of(story).set_traits(BackendTraits(1, 1, capacity_blocks=8))
    report(story, GONE)
    report(story, UP)
    assert key in story.runtime.primary.audit().directory.known
    assert story.facade.take_events() == []


def test_a_server_that_is_back_is_tried_at_once() -> None:
    """What opened the breaker was its absence."""
    story, key = story_with_a_stored_block(breaker_failures_max=1, breaker_pause_s=60.0)
    look_up(story, key)
    story.answer_all(Outcome.FAILED)
    assert link_of(story).audit().breaker is BreakerState.OPEN
    report(story, GONE)
    report(story, UP)
    assert link_of(story).audit().breaker is BreakerState.HALF_OPEN
    assert look_up(story, key, "again") is BlockState.PROBING


def test_a_tier_that_was_long_in_opening_is_tried_at_once() -> None:
    """It seemed to hang until then, and had a pause of a minute before it."""
    story, key = story_with_a_stored_block(breaker_pause_s=60.0)
    look_up(story, key)
    story.let_pass(60.0)  # the probe is late
    assert link_of(story).audit().breaker is BreakerState.OPEN
    assert look_up(story, key, "meanwhile") is BlockState.ABSENT
    story.tell(wire.TierOpened())
    assert look_up(story, key, "again") is BlockState.PROBING


def test_a_probe_on_trial_that_ends_with_its_server_is_followed_by_another() -> None:
    """It has shown nothing. Without another the breaker stays half-open, and asks no more."""
    story = Story(breaker_failures_max=1, breaker_pause_s=1.0)
    first, second, third = keys_of(3)
    look_up(story, first)
    story.let_pass(60.0)  # the probe is late
    assert link_of(story).audit().breaker is BreakerState.OPEN
    story.let_pass(2.0)
    assert look_up(story, second, "trial") is BlockState.PROBING
    story.runtime.cell.settle()
    assert link_of(story).in_flight() == (1, 0, 0)
    report(story, GONE)
    report(story, UP)
    assert link_of(story).audit().breaker is BreakerState.HALF_OPEN
    assert look_up(story, third, "again") is BlockState.PROBING
    story.answer_all()
    assert link_of(story).audit().breaker is BreakerState.CLOSED


def test_a_tier_that_needs_a_server_is_asked_for_nothing_until_it_has_reported_one() -> None:
    story = Story()
    (key,) = keys_of(1)
    link_of(story).set_traits(BackendTraits(1, 1, connects=True))
    assert story.facade.statistics().tiers[0].connection == "CONNECTING"
    assert look_up(story, key) is BlockState.ABSENT
    report(story, UP)
    assert look_up(story, key, "again") is BlockState.PROBING


def test_what_a_new_backend_has_reported_by_the_time_it_is_met_holds() -> None:
    """One in a thread is open, and may have reached its server, when the link hears of it."""
    story, key = story_with_a_stored_block()
    traits = BackendTraits(1, 1, connects=True)
    for state, found in ((UP, BlockState.PROBING), (CONNECTING, BlockState.ABSENT)):
        story.restart(wire.ConnectionChanged(state), traits=traits)
        assert look_up(story, key, state.name) is found


def test_how_a_tier_stands_with_its_server_is_told_counted_and_shown() -> None:
    """The end of a fault says how long that lasted: from the first report, and anew each time."""
    story = Story()
    states = (CONNECTING, UP, GONE, GONE, UP, GONE, UP)
    for pause_s, state in zip((1, 2, 4, 8, 16, 32, 64), states, strict=True):
        story.let_pass(pause_s)
        report(story, state)
        assert story.facade.statistics().tiers[0].connection == state.name
    told = [(each.event, each.level, each.numbers) for each in story.runtime.cell.notices]
    nothing = {"blocks_not_loaded": 0, "blocks_not_stored": 0}
    assert told == [
        ("tier has reached its server", "info", {}),
        ("tier lost its server", "warning", {}),
        ("tier has reached its server", "info", {"seconds": 8 + 16, **nothing}),
        ("tier lost its server", "warning", {}),
        ("tier has reached its server", "info", {"seconds": 64, **nothing}),
    ]
    assert link_of(story).counts.connections_lost == 2


def test_a_server_that_flaps_is_told_of_once_until_it_was_steady_or_is_lost_for_long() -> None:
    """Two lines for each return would hide everything else in the log; each loss is counted."""
    story = Story()
    link, notices = link_of(story), story.runtime.cell.notices

    def turn(*states_s: tuple[Connection, float]) -> list[tuple[str, float | None]]:
        notices.clear()
        for state, for_s in states_s:
            report(story, state)
            story.let_pass(for_s)
        return [(each.event, each.numbers.get("seconds")) for each in notices]

    lost, back = "tier lost its server", "tier has reached its server"
    assert turn((GONE, 1), (UP, 1)) == [(lost, None), (back, 1)]
    assert turn(*[(GONE, 1), (UP, 30)] * 9) == []
    assert turn((GONE, LASTING_S - 1)) == []
    assert not link.is_at_rest, "a Tick logs the loss"
    story.let_pass(1)
    story.let_pass(9)
    assert link.is_at_rest
    assert turn((UP, STEADY_S)) == [(back, LASTING_S + 9)]
    assert turn((GONE, 0), (UP, 1)) == [(lost, None), (back, 0)]
    assert turn((GONE, 0)) == []
    story.restart()
    assert (turn((UP, 9)), link.is_at_rest) == ([], True)
    assert link.counts.connections_lost == 13


def test_a_tier_that_has_its_server_again_says_what_was_lost_without_it() -> None:
    story, key = story_with_a_stored_block()
    look_up(story, key)  # loads
    report(story, GONE)
    story.answer_all(Outcome.FAILED)
    story.store(keys_of(4, b"x"))
    story.store(keys_of(3, b"y"), "s")  # evicts three that wait for the tier
    report(story, UP)
    (end,) = (n for n in story.runtime.cell.notices if n.event == "tier has reached its server")
    assert (end.numbers["blocks_not_loaded"], end.numbers["blocks_not_stored"]) == (1, 3)


def test_a_restarted_tier_does_not_inherit_a_lost_connection() -> None:
    story, key = story_with_a_stored_block()
    report(story, GONE)
    story.restart()
    assert look_up(story, key) is BlockState.PROBING


# --- presence that fades ---


def test_what_others_may_have_evicted_is_asked_for_after_a_while() -> None:
    story, key = story_with_a_stored_block()
    link_of(story).set_traits(BackendTraits(1, 1, presence_ttl_s=10.0))
    story.store([key], "again")
    story.store(keys_of(4, b"m"), "other again")
    story.facade.take_events()
    story.let_pass(9.9)
    assert look_up(story, key, "soon") is BlockState.FILLING, "loaded without a question"
    story.facade.on_request_finished("soon")
    story.answer_all(Outcome.ABSENT)
    story.let_pass(0.2)
    assert look_up(story, key, "later") is BlockState.PROBING
    removed = [e for e in story.facade.take_events() if e.kind is EventKind.REMOVED and e.tier == 0]
    assert [event.keys for event in removed] == [(key,)], "of the load that found nothing alone"


def test_presence_fades_in_the_order_learned_and_no_more_is_kept_than_may_be() -> None:
    presence = FadingPresence(keys_max=3)
    presence.learn((b"a",), 0.0)
    assert presence.pop_faded(1e9, 9) == (), "it lasts for good"
    presence.last(5.0)
    presence.learn((b"a", b"b"), 0.0)
    presence.learn((b"c",), 1.0)
    assert presence.pop_faded(4.9, 9) == ()
    presence.learn((b"d",), 4.9)
    assert presence.pop_faded(4.9, 9) == (b"a", b"b"), "more than may be kept"
    assert presence.pop_faded(6.0, 9) == (b"c",)
    presence.learn((b"e",), 5.0)
    assert presence.pop_faded(1e9, 1) == (b"d",), "no more at once than may be"
    presence.forget()
    assert presence.pop_faded(1e9, 9) == ()
