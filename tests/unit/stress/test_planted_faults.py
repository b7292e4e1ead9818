"""A soak that finds nothing shows nothing: each fault of kvtier's past is found when it is back."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from stress.planted.planting import planted, plants
from tests.support.needs import needs

REPOSITORY = Path(__file__).parents[3]
ALL = "KVTIER_SOAK_PLANTS"
"""Set: all plants are looked for, which takes minutes; else those that show within seconds."""

FOUND_BY = {
    "falling_counter": ("--seed 5 --minutes 1", "fell from"),
    "late_load": (
        "--seed 5 --minutes 1",
        "events tell of|handlers of the engine raised|wrong bytes for",
    ),
    "lost_for_good": (
        "--seed 5 --minutes 0.2 --faults server_killed",
        "breakers stay open|redis serves nothing|redis has served nothing for 10",
    ),
    "no_sweep": (
        "--seed 71 --minutes 0.1 --faults none",
        "temporary files are left|unhandled exception in kvtier thread",
    ),
    "old_weights": ("--seed 5 --minutes 1", "wrong bytes for"),
    "other_number": ("--seed 71 --minutes 0.5 --faults fs_vanish", "3:stress_disk"),
    "password_kept": (
        "--seed 5 --minutes 1 --faults password_rotated",
        "redis has served nothing for 10",
    ),
    "pins_left": ("--seed 5 --minutes 2", "after the last fault"),
    "torn_blocks": ("--seed 71 --minutes 1", "wrong bytes for"),
    "unheard": ("--seed 71 --minutes 0.1 --faults none", "standard error stream:(?s:.*)KeyError"),
    "untold_losses": ("--seed 5 --minutes 0.2", "events tell what tiers don't have.*fs: "),
    "untold_removals": ("--seed 5 --minutes 0.2", "events tell what tiers don't have"),
}
"""What finds it, and what the run says then.

What a slot that two have shows first depends on which of them is quicker.
"""

QUICK = ("late_load", "old_weights", "torn_blocks")

pytestmark = pytest.mark.slow


def of(name: str) -> object:
    marks = [needs("fuse")] if plants()[name].layer == "filesystem" else []
    return pytest.param(name, marks=marks)


def test_each_plant_has_a_seed() -> None:
    assert sorted(FOUND_BY) == sorted(plants())
    assert len(plants()) >= 5


@pytest.mark.parametrize(
    "name", [of(name) for name in (FOUND_BY if os.environ.get(ALL) else QUICK)]
)
@pytest.mark.long  # a soak each, by the clock
@pytest.mark.timeout(900)
def test_a_planted_fault_is_found(name: str) -> None:
    arguments, said = FOUND_BY[name]
    command = ["--layer", plants()[name].layer, *arguments.split()]
    found = subprocess.run(
        [sys.executable, "-m", "stress", *command, "--plant", name],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 1, found.stderr
    assert re.search(said, found.stderr), found.stderr


@pytest.mark.parametrize("name", FOUND_BY)
def test_a_plant_takes_what_stands_in_its_place_takes(name: str) -> None:
    """Else the run finds that a call fails, and not the fault."""
    for owner, function, new in plants()[name].replacements:
        wanted = inspect.signature(getattr(owner, function)).parameters.values()
        required = [each for each in wanted if each.default is each.empty]
        by_name = {each.name: None for each in required if each.kind is each.KEYWORD_ONLY}
        by_place = [None for each in required if each.kind is each.POSITIONAL_OR_KEYWORD]
        inspect.signature(new).bind(*by_place, **by_name)


@pytest.mark.parametrize("name", FOUND_BY)
def test_a_plant_is_taken_back(name: str) -> None:
    """What was replaced is kvtier's own again, so that nothing else in the process has it."""
    replacements = plants()[name].replacements
    before = [getattr(owner, function) for owner, function, _ in replacements]
    environment = dict(os.environ)
    with planted(name):
        during = [getattr(owner, function) for owner, function, _ in replacements]
        assert all(new is not old for new, old in zip(during, before, strict=True))
        assert os.environ["KVTIER_STRESS_PLANT"] == name
    assert [getattr(owner, function) for owner, function, _ in replacements] == before
    assert dict(os.environ) == environment
