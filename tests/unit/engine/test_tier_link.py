"""What a link sends to its tier, and what it does with the answers."""

from __future__ import annotations

from kvtier.plugin_api.backend import Outcome
from tests.unit.engine._story import Story, keys_of


def test_a_full_tier_is_given_nothing_to_store_for_a_while() -> None:
    """Trying each block would only cost its pin. Loads go on meanwhile."""
    story = Story(slots=8, breaker_pause_s=5.0)
    full, later = keys_of(1, b"f"), keys_of(1, b"l")
    facade, counts = story.facade, story.runtime.engine.links[0].counts
    facade.on_request_started("w")
    grant = facade.prepare_store(full, "w")
    assert grant is not None
    facade.complete_store(grant.keys, "w")
    assert [batch.keys for batch in story.answer_all(Outcome.FULL)] == [tuple(full)]
    story.now += 4.9
    facade.step_end()
    grant = facade.prepare_store(later, "w")
    assert grant is not None
    facade.complete_store(grant.keys, "w")
    assert story.answer_all() == []
    assert counts.cascades_dropped == 1
    assert facade.statistics().primary.pinned_slots == 0
    story.now += 0.1
    facade.step_end()
    again = keys_of(1, b"a")
    grant = facade.prepare_store(again, "w")
    assert grant is not None
    facade.complete_store(grant.keys, "w")
    assert [batch.keys for batch in story.answer_all()] == [tuple(again)]
    assert counts.cascades_dropped == 1
