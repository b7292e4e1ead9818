"""Mistakes about tiers that need a server. Each must be caught."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

from mutating import Mutations

from kvtier.engine.connection import ServerConnection
from kvtier.engine.contents_relay import ContentsRelay
from kvtier.engine.probes import Probes
from kvtier.engine.tier_health import TierHealth

MUTATIONS = Mutations()
in_place_of = MUTATIONS.in_place_of


@in_place_of(Probes, "end_all")
def wait_for_the_answers_of_a_lost_server(*_: object) -> None:
    """Requests wait for what a server was asked that is gone, until the deadline."""


@in_place_of(TierHealth, "may_send")
def go_on_giving_work_to_a_lost_server(self: TierHealth, work: Any) -> bool:
    """The link looks at its circuit breakers only."""
    return self._breakers[work].may_send()


@in_place_of(ContentsRelay, "lost_server")
def believe_in_what_a_lost_server_had(*_: object) -> None:
    """A server that comes back empty is asked for all that it had."""


@in_place_of(ServerConnection, "begin_anew")
def take_the_next_cell_for_unconnected(*_: object) -> None:
    """A tier whose server was gone when it broke is never given anything again."""


@in_place_of(ContentsRelay, "_learned")
def believe_in_what_ends_without_a_server(real: Any, self: ContentsRelay, *changes: Any) -> None:
    """A store that ends after the server was lost says what is there once it is back."""
    with patch.object(ServerConnection, "is_up", new=True):
        real(self, *changes)
