"""Load or recompute, under every order of events."""

from __future__ import annotations

import pytest
from deciding_machine import KVTierDecidingSpec
from test_model import EXAMPLES_CI, PROFILE, check, check_fresh_seeds


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_every_promise_holds_while_requests_decide(capsys: pytest.CaptureFixture[str]) -> None:
    if PROFILE == "long":
        check_fresh_seeds(KVTierDecidingSpec, "lru", capsys)
    else:
        check(KVTierDecidingSpec, "lru", 20_261_124, EXAMPLES_CI)
