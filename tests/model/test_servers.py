"""Tiers that need a server, under every order of events, and the mistakes that are caught."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
from mutating import Mutations
from server_machine import KVTierOnServersSpec
from test_model import EXAMPLES_CI, PROFILE, check, check_fresh_seeds
from test_mutations import check_that_it_is_caught

from kvtier.engine.connection import ServerConnection
from kvtier.engine.tier_link import TierLink

MUTATIONS = Mutations()
in_place_of = MUTATIONS.in_place_of


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_every_promise_holds_while_servers_come_and_go(capsys: pytest.CaptureFixture[str]) -> None:
    if PROFILE == "long":
        check_fresh_seeds(KVTierOnServersSpec, "lru", capsys)
    else:
        check(KVTierOnServersSpec, "lru", 20_261_124, EXAMPLES_CI)


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


@pytest.mark.parametrize("name", sorted(MUTATIONS))
def test_the_model_checker_catches_of_servers(name: str) -> None:
    check_that_it_is_caught(KVTierOnServersSpec, MUTATIONS[name](), name)
