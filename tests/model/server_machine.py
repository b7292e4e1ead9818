"""The state machine of ``machine``, with tiers whose backends need a server."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule
from machine import KVTierSpec
from promises import is_running
from rules import PICKS, is_due

from kvtier.core import wire
from kvtier.plugin_api.backend import Connection

STATES = st.sampled_from([Connection.GONE, Connection.UP, Connection.CONNECTING])


class KVTierOnServersSpec(KVTierSpec):
    """The runtime, seen from a scheduler, from its tiers and from their servers."""

    @is_due("server", 3)
    @rule(tier=PICKS, state=STATES, empty=st.booleans())
    def a_server_is_lost_or_reached(self, tier: int, state: Connection, empty: bool) -> None:
        """The backend says so, maybe again; the server of a shared tier may have lost all."""
        world = self.world
        number = tier % len(world.devices)
        if world.dead[number] or world.fenced[number]:
            return
        shared = world.shape.tiers[number].capacity is None
        if shared and empty and state is not Connection.UP:
            world.devices[number].taken.update(world.devices[number].blocks)
            world.devices[number].blocks.clear()
        self._reported[number] = state
        world.runtime.tiers[number].inbox.post(wire.ConnectionChanged(state))

    def _fence(self, number: int) -> None:
        """A cell that follows says by itself what it has no server for."""
        self._reported.pop(number, None)
        super()._fence(number)

    @precondition(is_running)
    @invariant()
    def a_tier_without_its_server_is_given_nothing(self) -> None:
        """And no request waits for what it was asked before."""
        world = self.world
        for number, link in enumerate(world.links):
            seen = link.audit()
            if seen.connection is Connection.UP or number in world.broken_links:
                self._jobs_before.pop(number, None)
                continue
            assert not seen.probes, f"{link.name} has no server, and is waited for"
            before = self._jobs_before.setdefault(number, set(seen.jobs))
            assert set(seen.jobs) <= before, f"{link.name} has no server, and was given a job"

    @precondition(is_running)
    @invariant()
    def nothing_is_known_of_a_shared_tier_without_its_server(self) -> None:
        """It may have nothing any more once it is back."""
        world = self.world
        world.in_order(b"")
        world.drain_events()
        known = world.primary.audit().directory.known
        for number, link in enumerate(world.links):
            is_shared = world.shape.tiers[number].capacity is None
            if is_shared and link.audit().connection is not Connection.UP:
                assert not world.folded[number], f"events say what {link.name} has"
                assert not any(tiers >> number & 1 for tiers in known.values()), link.name

    def __init__(self) -> None:
        super().__init__()
        self._reported: dict[int, Connection] = {}  # by the backends of the present cells
        self._jobs_before: dict[int, set[int]] = {}  # of tiers that have no server

    def _rest(self) -> None:
        """Come to rest with all servers reached."""
        for number, state in self._reported.items():
            if state is not Connection.UP and not self.world.dead[number]:
                self.world.runtime.tiers[number].inbox.post(wire.ConnectionChanged(Connection.UP))
        self._reported.clear()
        super()._rest()
