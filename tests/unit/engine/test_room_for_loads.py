"""A request whose load finds no slot waits until others let go, or computing would be done."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvtier.core.messages import GroupKeys
from tests.unit.engine._decided import (
    ABSENT,
    CHUNK,
    FILLING,
    LENGTH,
    PLACE,
    PROBING,
    SPEED,
    Decided,
)

if TYPE_CHECKING:
    from kvtier.core.block_state import BlockState


class Crowded(Decided):
    """Another request's loads leave few slots for ours."""

    ROOM = 17

    def __init__(self, **settings: Any) -> None:
        super().__init__(block_s=0.001, slots=94, **settings)
        self.others = self.taught
        self.facade.on_request_started("other")
        assert self.look_up_all("other", self.others) == [FILLING] * len(self.others)
        self.facade.step_end()
        assert self.runtime.primary.promotions.room() == self.ROOM < LENGTH
        self.facade.on_request_started("r")

    def look_up_all(self, request: str, keys: list[bytes]) -> list[BlockState]:
        """Return the states of ``keys`` up to the first that is nowhere."""
        states = self.facade.lookup_states(keys, request, PLACE if request == "r" else None)
        while ABSENT not in states[-1:] and len(states) < len(keys):
            states.append(self.facade.lookup_state(keys[len(states)], request))
        return states

    def ours(self) -> list[BlockState]:
        return self.look_up_all("r", self.keys)


def test_a_request_waits_for_slots_that_another_holds() -> None:
    story = Crowded()
    assert story.ours() == [PROBING] * LENGTH
    story.step()
    story.facade.prepare_load(story.others, "other")
    assert story.ours() == [PROBING] * LENGTH, "the GPU still reads them"
    story.facade.complete_load(story.others, "other")
    assert story.ours() == [FILLING] * LENGTH
    assert (story.counts.requests_waited, story.counts.promotions_refused) == (1, 0)


def test_it_waits_no_longer_than_computing_would_take() -> None:
    story = Crowded()
    assert story.ours() == [PROBING] * LENGTH
    compute_s, load_s = LENGTH * CHUNK / SPEED, LENGTH * 0.001
    story.pass_time(compute_s - load_s - 0.02)
    assert story.ours() == [PROBING] * LENGTH
    story.pass_time(0.04)
    assert story.ours() == [FILLING] * story.ROOM + [ABSENT]
    assert (story.counts.requests_waited, story.counts.promotions_refused) == (1, 1)


def test_nobody_waits_for_slots_who_is_to_load_always() -> None:
    story = Crowded(load_policy="always")
    assert story.ours() == [FILLING] * story.ROOM + [ABSENT]
    assert story.counts.requests_waited == 0


def test_a_request_that_ended_waits_for_slots_no_longer() -> None:
    story = Crowded()
    assert story.ours() == [PROBING] * LENGTH
    story.end()
    assert story.look_up() == [PROBING] * LENGTH, "it is decided anew"
    assert story.counts.requests_waited == 2
    story.facade.on_requests_scheduled(["r"])
    assert story.runtime.primary._requests["r"].room_wanted == 0


def test_a_request_that_reserves_a_prefix_waits_for_slots_no_longer() -> None:
    """Else it would wait while it holds some."""
    story = Crowded()
    assert story.ours() == [PROBING] * LENGTH
    groups = [GroupKeys(tuple(story.keys), tuple(range(CHUNK, CHUNK * LENGTH + 1, CHUNK)))]
    assert story.facade.reserve_prefix(groups, "r", 0) == CHUNK * story.ROOM
    assert story.runtime.primary._requests["r"].room_wanted == 0
