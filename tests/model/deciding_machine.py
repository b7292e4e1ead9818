"""The state machine of ``machine`` with requests that load only what they do not compute sooner."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from lookup_rules import groups_of
from machine import SHAPES, KVTierSpec
from rules import PICKS, SCHEDULES
from world import PATHS

from kvtier.core.messages import TokenPlace
from kvtier.tier import driver_messages as d

if TYPE_CHECKING:
    from world import Request, Shape

    from kvtier.plugin_api.keys import Key

CHUNK_TOKENS = 4
PLACES = st.builds(TokenPlace, st.sampled_from([0, 40]), st.just(CHUNK_TOKENS))


def with_speed(shape: Shape, speed: float | None) -> Shape:
    """Return a shape whose engine computes so many tokens a second; None: it is learnt."""
    return type(shape)(**{**vars(shape), "prefill_tokens_per_s": speed})


class KVTierDecidingSpec(KVTierSpec):
    """Loads and computing are about as fast as one another, and take turns."""

    shapes: ClassVar[st.SearchStrategy[Shape]] = st.builds(
        with_speed, SHAPES, st.sampled_from([None, 10.0, 40.0, 100.0, 1e5])
    )

    @rule(
        tokens=st.sampled_from([0, 4, 40, 400]),
        seconds=st.sampled_from([None, 0.001, 0.01, 0.1, 10.0]),
    )
    def the_engine_tells_of_a_step(self, tokens: int, seconds: float | None) -> None:
        """It may be fast or slow, and may become the other."""
        self.world.in_order(b"")
        self.world.facade.on_step_computed(tokens, tokens * tokens, seconds)

    @rule(path=st.sampled_from(PATHS), schedule=SCHEDULES)
    def a_request_is_served_from_tiers(self, path: tuple[Key, ...], schedule: bytes) -> None:
        """So it is known what they take."""
        self.a_request_comes_and_is_promoted_for(path, len(path), schedule)
        self.a_step_ends(0.01, schedule)
        self.tiers_do_all_they_were_asked()
        self.a_step_ends(0.1, schedule)

    @rule(path=st.sampled_from(PATHS), seconds=st.sampled_from([0.01, 0.4, 1.1]))
    def a_request_comes_and_waits_for_what_it_decides_to_load(
        self, path: tuple[Key, ...], seconds: float
    ) -> None:
        """Tiers tell what they have, and then stall."""
        world = self.world
        while len(world.requests) >= 4:
            self.a_request_finishes(0, True, b"")
        self.a_request_starts(path, -1)
        for _ in range(3):
            place = TokenPlace(0, CHUNK_TOKENS)
            self.a_request_decides_what_it_loads(len(world.requests) - 1, len(path), place, b"")
            self.a_step_ends(0.01, b"")
            for number in range(len(world.devices)):
                self._serve(number, only=d.ProbeBatch)
        self.a_step_ends(seconds, b"")

    @rule(seconds=st.sampled_from([0.01, 0.4, 1.1]))
    def a_request_comes_while_another_holds_the_slots(self, seconds: float) -> None:
        """If it is to load, it waits for room."""
        world = self.world
        for path in PATHS[:2]:
            while world.requests:
                self.a_request_finishes(0, True, b"")
            self.a_request_comes_and_stores_all(path, b"")
            self.tiers_do_all_they_were_asked()
            self.a_step_ends(0.01, b"")
        self.a_request_is_served_from_tiers(PATHS[1], b"")
        while world.requests:
            self.a_request_finishes(0, True, b"")
        self.a_request_comes_and_is_promoted_for(PATHS[0], len(PATHS[0]), b"")
        self.a_request_comes_and_waits_for_what_it_decides_to_load(PATHS[1], seconds)

    @precondition(lambda self: self.world.requests)
    @rule(which=PICKS, count=st.integers(1, 7), place=PLACES, schedule=SCHEDULES)
    def a_request_decides_what_it_loads(
        self, which: int, count: int, place: TokenPlace, schedule: bytes
    ) -> None:
        """Once while it waits. Nothing is asked or promoted that it declines."""
        world = self.world
        request = self._request(which)
        probing = world.primary.audit().directory.waiters
        self._look_up_prefix(request, count, schedule, place)
        seen = world.primary.audit().directory
        for key in seen.declined.get(request.name, frozenset()):
            asked = seen.waiters.get(key, frozenset()) - probing.get(key, frozenset())
            assert request.name not in asked, f"{key!r} is declined, and asked for"

    @precondition(lambda self: self.world.requests)
    @rule(which=PICKS, window=st.sampled_from([None, 1, 2]), schedule=SCHEDULES)
    def a_prefix_of_all_groups_is_decided_for(
        self, which: int, window: int | None, schedule: bytes
    ) -> None:
        """As with one group; what is not reserved is not promoted."""
        world = self.world
        request = self._request(which)
        groups = groups_of(request.path, window)
        world.in_order(schedule)
        for key in request.path:
            world.facade.survey(key, request.name)
        self._reserve_prefix(request, groups, 0)

    def p11_only_a_contiguous_prefix_is_promoted(self, request: Request, key: Key) -> None:
        super().p11_only_a_contiguous_prefix_is_promoted(request, key)
        declined = self.world.primary.audit().directory.declined
        assert key not in declined[request.name], f"{key!r} is promoted for one that declined it"
