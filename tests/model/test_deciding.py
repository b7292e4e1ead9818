"""Load or recompute, under every order of events, and the mistakes that are caught."""

from __future__ import annotations

import pytest
from deciding_machine import KVTierDecidingSpec
from deciding_mutations import MUTATIONS
from test_model import EXAMPLES_CI, PROFILE, check, check_fresh_seeds
from test_mutations import check_that_it_is_caught


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_every_promise_holds_while_requests_decide(capsys: pytest.CaptureFixture[str]) -> None:
    if PROFILE == "long":
        check_fresh_seeds(KVTierDecidingSpec, "lru", capsys)
    else:
        check(KVTierDecidingSpec, "lru", 20_261_124, EXAMPLES_CI)


@pytest.mark.parametrize("name", sorted(MUTATIONS))
def test_the_model_checker_catches_of_decisions(name: str) -> None:
    check_that_it_is_caught(KVTierDecidingSpec, MUTATIONS[name](), name)
