"""Real processes over one bounded folder, killed at random, and measured from outside."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

import pytest

from stress.shared_folder.engines import FolderMeasure, StoringEngine
from stress.shared_folder.storing import FILE_BYTES
from tests.support.examples import SEED, examples
from tests.support.patience import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ENGINES = 3
CAPACITY_BLOCKS = 600
DISTINCT_BLOCKS = 4 * CAPACITY_BLOCKS
STORES_BETWEEN_KILLS = 300
CAPACITY = CAPACITY_BLOCKS * FILE_BYTES


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[list[StoringEngine]]:
    started = [
        StoringEngine(tmp_path / "kv", CAPACITY, number, DISTINCT_BLOCKS)
        for number in range(ENGINES)
    ]
    yield started
    for engine in started:
        engine.kill()


@pytest.mark.slow
def test_engines_that_are_killed_never_leave_more_than_the_capacity(
    tmp_path: Path, engines: list[StoringEngine]
) -> None:
    chance = Random(SEED)
    root = tmp_path / "kv"
    measure = FolderMeasure(root)
    highest = 0

    def measured(done: bool) -> bool:
        nonlocal highest
        size = measure.bytes()
        assert size <= CAPACITY, f"{size} of {CAPACITY} bytes"
        assert all(engine.is_alive() for engine in engines), "an engine failed"
        highest = max(highest, size)
        return done

    def stored() -> int:
        return sum(engine.stored for engine in engines)

    for number in range(examples(3)):
        goal = stored() + STORES_BETWEEN_KILLS
        until(lambda goal=goal: measured(stored() >= goal))
        place = chance.randrange(ENGINES)
        engines[place].kill()
        engines[place] = StoringEngine(root, CAPACITY, ENGINES + number, DISTINCT_BLOCKS)
    before = {engine: engine.stored for engine in engines}
    until(lambda: measured(all(engine.stored > before[engine] for engine in engines)))
    assert highest > CAPACITY // 2
