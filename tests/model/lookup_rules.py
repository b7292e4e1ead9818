"""Rules: requests come and go, and ask for blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from rules import PICKS, SCHEDULES, is_due, pick
from tier_rules import TierRules
from world import KEYS, PATHS, Request

from kvtier.core.block_state import BlockState
from kvtier.core.messages import GroupKeys
from kvtier.engine.primary.slot_table import GPU
from kvtier.tier import driver_messages as d

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtier.core.messages import TokenPlace
    from kvtier.plugin_api.keys import Key


def groups_of(path: Sequence[Key], window: int | None) -> list[GroupKeys]:
    """Return a path's keys by group; the last of several groups has a window."""
    by_group: dict[bytes, list[Key]] = {}
    for key in path:
        by_group.setdefault(key[-4:], []).append(key)
    last = list(by_group)[-1] if len(by_group) > 1 else None
    return [
        GroupKeys(tuple(keys), tuple(range(1, len(keys) + 1)), window if group == last else None)
        for group, keys in by_group.items()
    ]


class LookupRules(TierRules):
    """What a scheduler asks for."""

    # --- requests ---

    @precondition(lambda self: len(self.world.requests) < 4)
    @rule(path=st.sampled_from(PATHS), tiers=st.sampled_from([-1, -1, -1, 1, 2, 0]))
    def a_request_starts(self, path: tuple[Key, ...], tiers: int) -> None:
        """Requests share prefixes, and may be told which tiers to use."""
        world = self.world
        world.requests_started += 1
        request = Request(f"r{world.requests_started}", path, tiers)
        world.requests[request.name] = request
        world.in_order(b"")
        world.facade.on_request_started(request.name, tiers=tiers)

    @is_due("finish", 4, lambda self: self.world.requests)
    @rule(which=PICKS, knows_order=st.booleans(), schedule=SCHEDULES)
    def a_request_finishes(self, which: int, knows_order: bool, schedule: bytes) -> None:
        """Also with loads, stores, probes and promotions in flight."""
        world = self.world
        request = self._request(which)
        del world.requests[request.name]
        world.end_leases(request.name)
        world.in_order(schedule)
        order = request.path if knows_order else None
        world.facade.on_request_finished(request.name, order)

    @is_due("scheduled", 4, lambda self: self.world.requests)
    @rule(first=PICKS, count=st.integers(1, 2), schedule=SCHEDULES)
    def requests_are_scheduled(self, first: int, count: int, schedule: bytes) -> None:
        """It is decided what they load, whatever was promised to them."""
        world = self.world
        names = list(world.requests)[first % len(world.requests) :][:count]
        for name in names:
            world.end_leases(name)
        world.in_order(schedule)
        world.facade.on_requests_scheduled([*names, "unknown"])
        world.decided.update(names)

    # --- lookups ---

    @precondition(lambda self: self.world.requests)
    @rule(which=PICKS, count=st.integers(1, 7), schedule=SCHEDULES)
    def a_request_looks_up_its_prefix(self, which: int, count: int, schedule: bytes) -> None:
        """As lookup_prefix does: on, until a block is nowhere."""
        request = self._request(which)
        self.world.in_order(schedule)
        for key in request.path[:count]:
            if self._look_up(request, key, schedule) is BlockState.ABSENT:
                break

    @precondition(lambda self: self.world.requests)
    @rule(which=PICKS, count=st.integers(1, 7), schedule=SCHEDULES)
    def a_request_looks_up_its_prefix_in_one_go(
        self, which: int, count: int, schedule: bytes
    ) -> None:
        """As vLLM's adapter does: it ends at the first block that is nowhere, or earlier."""
        request = self._request(which)
        world = self.world
        refused = world.primary.counts.promotions_refused
        self._look_up_prefix(request, count, schedule)
        if world.primary.counts.promotions_refused > refused and not schedule:
            self.p11_room_is_used_up_to_the_reserve()

    @precondition(lambda self: self.world.requests)
    @rule(which=PICKS, index=PICKS, schedule=SCHEDULES)
    def a_request_looks_up_one_block(self, which: int, index: int, schedule: bytes) -> None:
        """A sliding window asks for blocks in the middle."""
        request = self._request(which)
        self.world.in_order(schedule)
        self._look_up(request, pick(request.path, index), schedule)

    @pytest.mark.promise(17)
    @precondition(lambda self: self.world.requests)
    @rule(which=PICKS, window=st.sampled_from([None, 1, 2]), schedule=SCHEDULES)
    def a_prefix_of_all_groups_is_reserved(
        self, which: int, window: int | None, schedule: bytes
    ) -> None:
        """Nothing is promoted but what one prefix of tokens needs, and all of that."""
        world = self.world
        request = self._request(which)
        groups = groups_of(request.path, window)
        world.in_order(schedule)
        for key in request.path:
            assert world.facade.survey(key, request.name) is not None
        before = {key for key in KEYS if world.primary.slot_of(key) is not None}
        tokens, needed = self._reserve_prefix(request, groups)
        for key in set(KEYS) - before - needed:
            assert world.primary.slot_of(key) is None, f"{key!r} is of no use to {tokens} tokens"

    @rule(path=st.sampled_from(PATHS), count=st.integers(1, 7), schedule=SCHEDULES)
    def a_request_comes_and_is_promoted_for(
        self, path: tuple[Key, ...], count: int, schedule: bytes
    ) -> None:
        """Tiers say what they have, and begin to load it; when they end is another rule's."""
        world = self.world
        while len(world.requests) >= 4:
            self.a_request_finishes(0, True, b"")
        self.a_request_starts(path, -1)
        for _ in range(2):
            self.a_request_looks_up_its_prefix(len(world.requests) - 1, count, schedule)
            self.a_step_ends(0.01, schedule)
            for number in range(len(world.devices)):
                self._serve(number, only=d.ProbeBatch)

    @is_due("unknown", 10)
    @rule(key=st.sampled_from(KEYS), schedule=SCHEDULES)
    def an_unknown_request_is_never_served_from_a_tier(self, key: Key, schedule: bytes) -> None:
        """Nothing is asked or promoted for it."""
        world = self.world
        before = world.states[key]
        world.in_order(schedule)
        said = world.facade.lookup(key, "unknown")
        if before is BlockState.ABSENT:
            assert world.states[key] is not BlockState.FILLING
            assert said is False
        if before is BlockState.READY:
            assert said is True

    def _look_up_prefix(
        self, request: Request, count: int, schedule: bytes, place: TokenPlace | None = None
    ) -> None:
        world = self.world
        world.in_order(schedule)
        before = dict(world.states)
        keys = request.path[:count]
        states = world.facade.lookup_states(keys, request.name, place)
        assert BlockState.ABSENT not in states[:-1]
        for key, state in zip(keys, states, strict=False):
            self._note_answer(request, key, before[key], state)

    def _reserve_prefix(
        self, request: Request, groups: Sequence[GroupKeys], first_token: int | None = None
    ) -> tuple[int, set[Key]]:
        """Return the tokens of the prefix that was reserved, and the keys that it needs."""
        world = self.world
        world.decided.discard(request.name)
        leased = set(world.slots.leased)
        tokens = world.facade.reserve_prefix(groups, request.name, first_token)
        needed = (
            {key for group in groups for key in group.needed(tokens) or ()} if tokens else set()
        )
        for key in needed:
            slot = world.primary.slot_of(key)
            assert slot is not None, f"{key!r} is needed for {tokens} tokens, and not promoted"
            if slot not in leased and slot in world.slots.leased:
                self._leased(request, key)
        return tokens, needed

    def _look_up(self, request: Request, key: Key, schedule: bytes = b"") -> BlockState:
        world = self.world
        before = world.states[key]
        refused = world.primary.counts.promotions_refused
        state = world.facade.lookup_state(key, request.name)
        self._note_answer(request, key, before, state)
        if world.primary.counts.promotions_refused > refused and not schedule:
            self.p11_room_is_used_up_to_the_reserve()
        return state

    def _note_answer(
        self, request: Request, key: Key, before: BlockState, state: BlockState
    ) -> None:
        if before is BlockState.READY:
            assert state is BlockState.READY
        self.world.decided.discard(request.name)
        if state is not BlockState.PROBING and request.behind.get(key[-4:]) == key:
            del request.behind[key[-4:]]  # it waited for room, and has it
        if state is BlockState.READY:
            request.hits[key] = None
        elif state is BlockState.PROBING:
            request.behind.setdefault(key[-4:], key)
        elif state is BlockState.FILLING and before in {BlockState.ABSENT, BlockState.PROBING}:
            self.p11_only_a_contiguous_prefix_is_promoted(request, key)

    def p11_only_a_contiguous_prefix_is_promoted(self, request: Request, key: Key) -> None:
        """Only a contiguous prefix is promoted, and the promoted block is leased."""
        world = self.world
        gap = request.behind.get(key[-4:])
        assert gap is None, f"{key!r} is promoted behind {gap!r}, which may be nowhere"
        slot = world.primary.slot_of(key)
        assert slot is not None
        source = world.slots.audit().sources[slot]
        assert source != GPU
        assert request.tiers >> source & 1, f"{request.name} may not be served from {source}"
        self._leased(request, key)

    def _leased(self, request: Request, key: Key) -> None:
        world = self.world
        until = world.primary.audit().promotions.now + world.config.lease_timeout_s
        world.leases[key] = (request.name, until)
        world.lease_until[request.name] = until

    def p11_room_is_used_up_to_the_reserve(self, excluded: Sequence[Key] = ()) -> None:
        """A promotion is refused only to keep the reserve, or where nothing can be evicted."""
        world = self.world
        most = world.slots.count - world.config.store_reserve_slots
        if world.primary.audit().promotions.held_slots < most:
            self._assert_nothing_can_be_evicted(excluded)

    def _assert_nothing_can_be_evicted(self, excluded: Sequence[Key]) -> None:
        world = self.world
        slots = world.slots
        assert not slots.free_count(), "there are free slots"
        for key, slot in slots.slot_of.items():
            if slots.is_ready(slot):
                assert slots.is_held(slot) or slot in slots.hits or key in excluded, (
                    f"slot {slot} could have been evicted"
                )
