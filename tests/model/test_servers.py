"""Tiers that need a server, under every order of events."""

from __future__ import annotations

import pytest
from server_machine import KVTierOnServersSpec
from test_model import EXAMPLES_CI, PROFILE, check, check_fresh_seeds


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_every_promise_holds_while_servers_come_and_go(capsys: pytest.CaptureFixture[str]) -> None:
    if PROFILE == "long":
        check_fresh_seeds(KVTierOnServersSpec, "lru", capsys)
    else:
        check(KVTierOnServersSpec, "lru", 20_261_124, EXAMPLES_CI)
