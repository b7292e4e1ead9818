"""Mistakes about tiers that need a server. Each must be caught."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from mutating import Mutations

from kvtier.engine.link.presence_feed import PresenceFeed
from kvtier.engine.link.probes import Probes
from kvtier.engine.link.tier_health import ServerConnection, TierHealth

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvtier.engine.link.circuit_breaker import Work

MUTATIONS = Mutations()
mutation, in_place_of = MUTATIONS.add, MUTATIONS.in_place_of


@in_place_of(Probes, "end_all")
def wait_for_the_answers_of_a_lost_server(*_: object) -> None:
    """Requests wait for what a server was asked that is gone, until the deadline."""


@mutation
def go_on_giving_work_to_a_lost_server() -> Iterator[None]:
    """The link looks at its circuit breakers only."""

    def try_acquire(self: TierHealth, work: Work) -> bool:
        return self._breakers[work].try_acquire()

    def takes(self: TierHealth, work: Work) -> bool:
        return self._breakers[work].allows

    with (
        patch.object(TierHealth, "try_acquire", try_acquire),
        patch.object(TierHealth, "takes", takes),
    ):
        yield


@in_place_of(PresenceFeed, "on_server_lost")
def believe_in_what_a_lost_server_had(*_: object) -> None:
    """A server that comes back empty is asked for all that it had."""


@in_place_of(ServerConnection, "restart")
def take_the_next_cell_for_unconnected(*_: object) -> None:
    """A tier whose server was gone when it broke is never given anything again."""


@in_place_of(PresenceFeed, "_tell_in_turn")
def tell_what_comes_later_before_what_waits(self: PresenceFeed, change: Any) -> None:
    """A block that was lost and is stored again counts as lost in the end."""
    if change.removed and self._gone_left <= 0:
        self._untold.append(change)
    else:
        self._tell(change)


@in_place_of(PresenceFeed, "_learned")
def believe_in_what_ends_without_a_server(
    real: Any, self: PresenceFeed, *changes: Any, **how: Any
) -> None:
    """A store that ends after the server was lost says what is there once it is back."""
    with patch.object(ServerConnection, "is_up", new=True):
        real(self, *changes, **how)
