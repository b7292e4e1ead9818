"""The model checker can fail: each seeded mistake in the real code is caught."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test
from machine import KVTierSpec
from mutations import MUTATIONS

EXAMPLES_MAX = 200
#: A block must be stored, found, read and squeezed out while it is read: seldom in one example.
EXAMPLES_MAX_OF = {"evict_a_pinned_slot": 2_000}
STEPS = 60


def _check(examples: int) -> None:
    """Check without shrinking: that it fails is all that is asked."""

    class Seeded(KVTierSpec):
        pass

    run_state_machine_as_test(
        seed(1)(Seeded),
        settings=settings(
            max_examples=examples,
            stateful_step_count=STEPS,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.parametrize("name", sorted(MUTATIONS))
def test_the_model_checker_catches(name: str) -> None:
    with MUTATIONS[name](), pytest.raises(BaseException) as caught:  # noqa: PT011 - any failure
        _check(EXAMPLES_MAX_OF.get(name, EXAMPLES_MAX))
    assert not isinstance(caught.value, KeyboardInterrupt | pytest.fail.Exception)


def test_without_a_mutation_the_same_examples_pass() -> None:
    _check(EXAMPLES_MAX)
