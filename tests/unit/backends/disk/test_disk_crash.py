"""A writer that is killed at any moment leaves a folder that serves every block it finds whole.

``KVTIER_DISK_KILLS`` sets how many times the writer is killed: 20 in ``make test``, after which one
folder has large blocks and one has small ones, and 500 in ``make test-long``.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from kvtier.plugin_api.backend import Outcome
from kvtier_backends.disk.folder import claim
from kvtier_backends.disk.format import OWN_PAGE_BYTES
from tests.support.examples import SEED
from tests.support.patience import PATIENCE_S
from tests.unit.backends.disk import _disk_child
from tests.unit.backends.disk._disk import CAPACITY_BYTES, CONTEXT, folder_bytes, open_disk
from tests.unit.backends.disk._disk_child import NUMBERS_PER_CALL

if TYPE_CHECKING:
    from pathlib import Path

    from kvtier.plugin_api.backend import BackendContext

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
KILLS = int(os.environ.get("KVTIER_DISK_KILLS", "20"))
KILLS_PER_FOLDER = max(1, min(20, KILLS // 2))
BLOCKS_FOUND_MIN = 0.9
LIFE_S_MAX = 0.06

#: A call's blocks have table pages of their own, unless a region ends among them.
LARGE = replace(CONTEXT, block_bytes=OWN_PAGE_BYTES // NUMBERS_PER_CALL)
LARGE_CAPACITY_BYTES = 64 << 20
FOLDERS_PER_LARGE = 5

# Each writer is forked from a process that has imported everything: a start takes milliseconds.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload([_disk_child.__name__, "pytest"])  # pytest is their __main__


@pytest.fixture(autouse=True)
def _waits_for_the_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of a killed writer goes in its time."""
    monkeypatch.setattr(claim, "LOCK_WAIT_S_MAX", PATIENCE_S)


def run_and_kill(
    path: Path, context: BackendContext, capacity_bytes: int, first: int, life_s: float
) -> list[int]:
    """Let a child store until it is killed ``life_s`` later; returns what it acknowledged."""
    ours, theirs = PROCESSES.Pipe(duplex=False)
    given = (str(path), context, capacity_bytes, first, theirs)
    child = PROCESSES.Process(target=_disk_child.run, args=given)
    child.start()
    theirs.close()
    with ours, open(ours.fileno(), "rb", closefd=False) as said:
        assert said.readline() == b"ready\n"
        time.sleep(life_s)  # the moment of the kill is what is random here
        child.kill()
        child.join()
        child.close()
        return [int(line) for line in said if line.endswith(b"\n")]


@pytest.mark.parametrize("folder", range(-(-KILLS // KILLS_PER_FOLDER)))
async def test_a_killed_writer_leaves_whole_blocks_and_a_bounded_folder(
    folder: int, tmp_path: Path
) -> None:
    """Acknowledged blocks come back whole; a kill takes none but what the bound takes."""
    path = tmp_path / "kv"
    context, capacity_bytes = CONTEXT, CAPACITY_BYTES
    if folder % FOLDERS_PER_LARGE == 0:
        context, capacity_bytes = LARGE, LARGE_CAPACITY_BYTES
    rng = random.Random(SEED + folder)
    newest: list[int] = []
    first = 1000
    for _ in range(KILLS_PER_FOLDER):
        life_s = rng.uniform(0, LIFE_S_MAX)
        newest.extend(run_and_kill(path, context, capacity_bytes, first, life_s))
        assert folder_bytes(path) <= capacity_bytes
        async with open_disk(path, context, capacity_bytes=capacity_bytes) as disk:
            assert disk.count("entries_beyond") == 0
            capacity = disk.capacity
            outcomes = [(await disk.load(number))[0] for number in newest]
            # A kill is no power cut: what was acknowledged is whole.
            assert set(outcomes) <= {Outcome.DONE, Outcome.ABSENT}
            found = [n for n, o in zip(newest, outcomes, strict=True) if o is Outcome.DONE]
            expected = newest[-capacity // 2 :]
            assert len(set(found) & set(expected)) >= BLOCKS_FOUND_MIN * len(expected)
            await disk.remove(*found[:1])
            assert await disk.store(first - 1) == [Outcome.DONE]
            newest = found
        first += 100_000
        assert folder_bytes(path) <= capacity_bytes
