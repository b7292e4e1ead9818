"""KV events of two runtimes over one bounded folder, of which one evicts for both."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import pytest

from kvtier.core.events import EventKind
from kvtier_backends.fs.bound import folder_bound as keeper_module
from tests.support.patience import pause
from tests.unit.backends.fs.bound._timing import QUICK
from tests.unit.runtime.test_runtime import BLOCK_BYTES, PATIENT, Runtime

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

CAPACITY_BLOCKS = 64
CAPACITY = CAPACITY_BLOCKS * (BLOCK_BYTES + 4096)
FS = 0  #: the number of the tier


class Engine:
    """A runtime, and what a router that folds its events finds in the shared folder."""

    def __init__(self, root: Path, name: str) -> None:
        tier = {
            "type": "fs",
            "root_dir": str(root),
            "capacity_bytes": CAPACITY,
            "isolation": "thread",
        }
        tier["enable_kv_events"] = True
        self.runtime = Runtime(
            root, collect_events=True, secondary_tiers=[{**tier, **PATIENT}], breaker_pause_s=0.01
        )
        self.found: set[bytes] = set()
        self.removed: set[bytes] = set()
        self._name = name
        self._requests = 0

    def hear(self) -> None:
        """Fold the events since the last time."""
        self.runtime.facade.step_end()
        for event in self.runtime.facade.take_events():
            if event.tier != FS:
                continue
            if event.kind is EventKind.STORED:
                self.found.update(event.keys)
            elif event.kind is EventKind.REMOVED:
                self.found.difference_update(event.keys)
                self.removed.update(event.keys)
            elif event.kind is EventKind.CLEARED:
                self.found.clear()

    def store(self, blocks: int) -> list[bytes]:
        """Store new blocks until the router has heard of so many more; return these."""
        stored: set[bytes] = set()
        while len(stored) < blocks:
            self._requests += 1
            name = hashlib.sha256(f"{self._name}{self._requests}".encode()).digest()
            self.runtime.store([name + bytes(4)])
            before = set(self.found)
            self.hear()
            stored |= self.found - before
        return sorted(stored)

    def serve(self, keys: list[bytes]) -> int:
        """Serve each block to a request of its own; return how many there were."""
        return sum(self.runtime.hits([key], key.hex()) for key in keys)


@pytest.fixture
def engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Engine, Engine]]:
    monkeypatch.setattr(keeper_module, "Timing", lambda: QUICK)
    one, other = Engine(tmp_path / "kv", "one"), Engine(tmp_path / "kv", "other")
    yield one, other
    assert [each.runtime.facade.close() for each in (one, other)] == [True, True]


def there(root: Path) -> set[bytes]:
    """Return the keys of all blocks in the folder."""
    return {bytes.fromhex(path.stem) for path in root.rglob("*.kv")}


def until_both(engines: tuple[Engine, Engine], done: Callable[[], object]) -> None:
    """Let both hear events until something holds."""

    def is_done() -> bool:
        for each in engines:
            each.hear()
        pause()
        return bool(done())

    engines[0].runtime.until(is_done)


def test_a_router_finds_nothing_that_another_engine_evicted(
    engines: tuple[Engine, Engine], tmp_path: Path
) -> None:
    """One engine cleans for both, so blocks that the other one announced go by its hand."""
    one, other = engines
    first = {each: set(each.store(10)) for each in engines}
    one.store(CAPACITY_BLOCKS)
    other.store(CAPACITY_BLOCKS // 2)
    until_both(engines, lambda: all(first[each] <= each.removed for each in engines))
    until_both(engines, lambda: all(each.found <= there(tmp_path / "kv") for each in engines))
    assert there(tmp_path / "kv") <= one.found | other.found, "somebody announced each"


def test_a_router_finds_no_evicted_block_that_its_engine_has_only_looked_up(
    engines: tuple[Engine, Engine], tmp_path: Path
) -> None:
    """A lookup that finds another engine's block announces it, too."""
    one, other = engines
    shared = one.store(8)
    assert other.serve(shared) == len(shared)
    until_both(engines, lambda: set(shared) <= other.found)
    one.store(CAPACITY_BLOCKS + 16)
    until_both(engines, lambda: not there(tmp_path / "kv") & set(shared))
    until_both(engines, lambda: all(each.found <= there(tmp_path / "kv") for each in engines))
    assert not other.found & set(shared)
