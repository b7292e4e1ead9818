"""The model checker can fail: each seeded mistake in the real code is caught.

``make test`` tells the story again that showed a mistake before; ``make test-long`` searches
for one from scratch, which shows that the model still finds it.
"""

from __future__ import annotations

import counterexamples
import pytest
from counterexamples import FIND, UnfitError, is_caught, play, search
from crowded_machine import KVTierCrowdAfterResetSpec, KVTierCrowdedSpec
from disk_machine import KVTierOnDiskSpec, KVTierOnDyingDiskSpec
from disk_mutations import DISK_MUTATIONS
from machine import KVTierSpec
from mistakes import MISTAKES

EXAMPLES_THAT_PASS = 40
#: What a broken disk leaves behind is closed by the garbage collector.
UNRAISABLE = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
NAMES = [
    pytest.param(name, marks=UNRAISABLE) if name in DISK_MUTATIONS else name
    for name in sorted(MISTAKES)
]


def test_each_mistake_has_a_counterexample_and_there_are_no_others() -> None:
    assert set(counterexamples.stored()[1]) == set(MISTAKES), f"{FIND}'...' finds what is missing"


@pytest.mark.parametrize("name", NAMES)
def test_a_counterexample_shows(name: str) -> None:
    """It ends badly with the mistake, and the same story ends well without it."""
    mistake = MISTAKES[name]
    version, blobs = counterexamples.stored()
    anew = f"find it anew: {FIND}{name}"
    try:
        with mistake.made():
            shown = play(mistake.spec, blobs[name], version)
        without = play(mistake.spec, blobs[name], version)
    except UnfitError as error:
        raise AssertionError(f"its story does not fit any more ({error}); {anew}") from None
    assert not without.complaint, "the real code breaks a promise"
    assert shown.complaint, f"its story does not show it any more; {anew}"
    assert shown.is_the_models, f"the mistake does not fit the code: {shown.complaint}"


@pytest.mark.long
@pytest.mark.timeout(0)
@pytest.mark.parametrize("name", NAMES)
def test_the_model_checker_catches(name: str) -> None:
    assert is_caught(MISTAKES[name])


@pytest.mark.parametrize(
    "spec",
    [
        # These two are played in the gate without a mutation: test_model.py, test_disk_model.py.
        pytest.param(KVTierSpec, marks=pytest.mark.long),
        pytest.param(KVTierOnDiskSpec, marks=pytest.mark.long),
        KVTierCrowdedSpec,
        KVTierCrowdAfterResetSpec,
        KVTierOnDyingDiskSpec,
    ],
)
def test_without_a_mutation_the_same_examples_pass(spec: type[KVTierSpec]) -> None:
    examples = EXAMPLES_THAT_PASS if spec is KVTierSpec else EXAMPLES_THAT_PASS // 2
    assert not search(spec, examples, number=1).complaint
