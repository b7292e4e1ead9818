"""Mistakes about tiers that need a server. Each must be caught."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

from mutating import Mutations

from kvtier.engine.connection import ServerConnection
from kvtier.engine.tier_link import TierLink

MUTATIONS = Mutations()
in_place_of = MUTATIONS.in_place_of


@in_place_of(TierLink, "_end_all_probes")
def wait_for_the_answers_of_a_lost_server(*_: object) -> None:
    """Requests wait for what a server was asked that is gone, until the deadline."""


@in_place_of(TierLink, "_may_send")
def go_on_giving_work_to_a_lost_server(self: TierLink, work: Any) -> bool:
    """The link looks at its circuit breaker only."""
    return self._breaker.may_send(work)


@in_place_of(TierLink, "_forget_contents")
def believe_in_what_a_lost_server_had(*_: object) -> None:
    """A server that comes back empty is asked for all that it had."""


@in_place_of(ServerConnection, "begin_anew")
def take_the_next_cell_for_unconnected(*_: object) -> None:
    """A tier whose server was gone when it broke is never given anything again."""


@in_place_of(TierLink, "_learned")
def believe_in_what_ends_without_a_server(real: Any, self: TierLink, *changes: Any) -> None:
    """A store that ends after the server was lost says what is there once it is back."""
    with patch.object(ServerConnection, "is_up", new=True):
        real(self, *changes)
