"""vLLM's own core, scheduler and connector over kvtier, and a model that knows what it wrote.

A scenario is played from its seed; a failure says which, and what was drawn from it.
``python -m tests.rig --seed N`` plays one alone.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

from tests.rig.at_rest import CounterFell, NotAtRest
from tests.rig.engine import EngineEnded
from tests.rig.happenings import CompletionCounted
from tests.rig.planted import MISTAKES, OF_THE_RELEASE
from tests.rig.runner import WrongKV
from tests.rig.scenario import play
from tests.rig.shape import PARTS, RELEASE
from tests.rig.slot_watch import LeftBehind, SlotMisused
from tests.support.examples import SEED, TIMES

if TYPE_CHECKING:
    from collections.abc import Iterable

SCENARIOS = int(os.environ.get("KVTIER_RIG_SCENARIOS", "150")) * TIMES
IN_A_TEST = 50
IN_A_SHAPE = 2
OFFSET = 0 if RELEASE < (0, 33) else SCENARIOS
"""Each release plays other scenarios: most of what a seed draws is the same on both."""
FOUND_WITHIN = 300  #: scenarios, by far
FOUND = (WrongKV, SlotMisused, LeftBehind, CompletionCounted, CounterFell, NotAtRest, EngineEnded)


@pytest.mark.parametrize("first", range(0, SCENARIOS, IN_A_TEST))
def test_attention_reads_what_the_model_wrote(first: int) -> None:
    """The same scenarios each time: ``make rig`` and ``make test-long`` play others."""
    first += 2 * SEED * SCENARIOS + OFFSET
    _play_all(range(first, first + IN_A_TEST))


@pytest.mark.parametrize("shape", PARTS)
def test_a_tier_sees_of_a_block_of_a_smaller_group_no_more_than_that(shape: str) -> None:
    _play_all(range(OFFSET, OFFSET + IN_A_SHAPE), **PARTS[shape])


@pytest.mark.parametrize(
    "mistake",
    [
        pytest.param(each, marks=[] if each in OF_THE_RELEASE else pytest.mark.one_release)
        for each in MISTAKES
    ],
)
def test_the_rig_finds_what_is_wrong(mistake: str) -> None:
    """A rig that finds nothing shows nothing."""
    plant, focus, first = MISTAKES[mistake]
    with plant(), pytest.raises(FOUND):
        _play_all(range(first, first + FOUND_WITHIN), **focus)


def _play_all(seeds: Iterable[int], **focus: Any) -> None:
    for seed in seeds:
        play(seed, **focus)
