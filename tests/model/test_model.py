"""The model checker: every promise, under every order of events that it can think of.

``KVTIER_MODEL_PROFILE=ci`` (the default) runs a fixed number of examples, in
some minutes. ``long`` runs fresh seeds for ``KVTIER_MODEL_SECONDS``. A
failure prints a blob; ``@reproduce_failure`` on ``KVTierSpec.TestCase`` runs it again.
"""

from __future__ import annotations

import os
import random
import sys
import time

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test
from known_policies import POLICIES
from machine import KVTierSpec

STEPS = 60
EXAMPLES_CI = 100  # `make test-long` goes on with fresh seeds
EXAMPLES_AGAIN_CI = 30
ALL_EXAMPLES_WITH = ("reuse",)
"""The default policy. The others are told the first of the same stories: one seed
draws much the same, whichever policy chooses."""
EXAMPLES_A_SEED = 300
RUNS = len(POLICIES) + 5  # and with disks (2), servers, decisions and staging
PROFILE = os.environ.get("KVTIER_MODEL_PROFILE", "ci")
SECONDS = float(os.environ.get("KVTIER_MODEL_SECONDS") or 600)


def profile(examples: int) -> settings:
    """Return settings for so many examples. Shrinking takes minutes; explaining takes more."""
    return settings(
        max_examples=examples,
        stateful_step_count=STEPS,
        database=None,
        print_blob=True,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )


def check(
    spec: type[RuleBasedStateMachine], policy: str | None, number: int, examples: int
) -> None:
    """Check one seed."""
    chosen = {"make_policy": POLICIES[policy]} if policy else {}
    seeded = type(spec.__name__, (spec,), chosen)
    run_state_machine_as_test(seed(number)(seeded), settings=profile(examples))


def check_fresh_seeds(
    spec: type[RuleBasedStateMachine], policy: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Run fresh seeds, printed, for as long as told."""
    started = time.monotonic()
    ran = 0
    while time.monotonic() - started < SECONDS / RUNS:
        number = random.SystemRandom().randrange(2**32)
        with capsys.disabled():
            sys.stderr.write(f"{spec.__name__}, {policy}: seed {number}, {ran} examples so far\n")
        check(spec, policy, number, EXAMPLES_A_SEED)
        ran += EXAMPLES_A_SEED
    with capsys.disabled():
        sys.stderr.write(f"{ran} examples in {time.monotonic() - started:.0f} s\n")


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("policy", POLICIES)
def test_every_promise_holds_under_every_order_of_events(
    policy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if PROFILE == "long":
        check_fresh_seeds(KVTierSpec, policy, capsys)
    else:
        examples = EXAMPLES_CI if policy in ALL_EXAMPLES_WITH else EXAMPLES_AGAIN_CI
        check(KVTierSpec, policy, 20_261_121, examples)
