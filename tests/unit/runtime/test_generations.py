"""A reset begins a new generation of weights: real backends, real cells, real restarts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, strategies

from kvtier import Misuse, Namespace, RuntimeConfig, SlotMemory, open_runtime
from kvtier.core import messages as m
from kvtier.core.events import EventKind
from kvtier.core.generations import (
    ORIGINAL,
    Generations,
    is_found_again,
    mark_of,
    mark_of_name,
    marked,
    unmarked,
)
from kvtier.plugin_api.backend import BackendTraits, Outcome
from kvtier.plugin_api.keys import GROUP_BYTES, MARK_BYTES
from kvtier.policies.eviction.lru import LRUPolicy
from kvtier.settings.runtime_config import TierConfig
from kvtier.tier.old_generations import OldGenerations
from tests.support.cell import open_test_runtime
from tests.support.patience import PATIENCE_S, looks, pause

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

BLOCK_BYTES = 4096
SLOTS = 16
KEYS = [bytes([number]) * 32 + bytes(4) for number in range(SLOTS // 2)]
MARKS = strategies.sampled_from([ORIGINAL, mark_of_name("v1"), Generations().begin(None) or b""])


@given(keys=strategies.lists(strategies.binary(min_size=1, max_size=70)), mark=MARKS)
def test_a_key_comes_back_from_its_mark_and_the_mark_from_the_key(
    keys: list[bytes], mark: bytes
) -> None:
    names = marked(tuple(keys), mark)
    assert unmarked(names, mark) == tuple(keys)
    assert all(mark_of(name) == mark for name in names)
    both = [each for each in zip(names, keys, strict=True) if len(each[1]) >= GROUP_BYTES]
    assert all(name[-GROUP_BYTES:] == key[-GROUP_BYTES:] for name, key in both)
    assert all(len(name) == len(key) + len(mark) for name, key in zip(names, keys, strict=True))


def test_only_what_has_no_name_is_never_found_again() -> None:
    generations = Generations("v1")
    assert generations.mark == mark_of_name("v1")
    assert generations.begin("v1") is None, "the weights are the same"
    first, second = generations.begin(None), generations.begin(None)
    assert first != second
    assert first is not None
    assert len(first) == MARK_BYTES
    assert [is_found_again(each) for each in (ORIGINAL, mark_of_name("v1"), first)] == [1, 1, 0]
    with pytest.raises(Misuse, match="a name has at least one character"):
        generations.begin("")


def test_weights_that_have_changed_begin_a_generation_whatever_a_reset_says() -> None:
    generations = Generations(keep=True)
    assert generations.begin(None) is None
    mark = generations.begin(None, has_changed=True)
    assert mark is not None
    assert not is_found_again(mark)


def test_what_nobody_finds_again_goes_first() -> None:
    old = OldGenerations()
    unnamed = Generations().begin(None)
    assert unnamed is not None
    kept, gone = {b"k%03d" % n for n in range(3)}, set(marked((b"a---", b"b---"), unnamed))
    old.leave(ORIGINAL, set(kept))
    old.leave(unnamed, set(gone))
    assert set(old.pop(2, ())) == gone
    assert old.pop(3, kept) == ()
    assert len(old) == 3
    assert set(old.pop(9, {b"k000"})) == kept - {b"k000"}
    assert b"k000" in old


class Engine:
    """A runtime over one tier, whose GPU computes with some weights."""

    def __init__(self, tier: dict[str, Any], weights: int, **settings: object) -> None:
        config = RuntimeConfig.from_mapping(
            {
                "cascade_slots_fraction_max": 1.0,
                "secondary_tiers": [{"probe_timeout_s": PATIENCE_S, **tier}],
                **settings,
            },
            slot_count=SLOTS,
            block_bytes=BLOCK_BYTES,
        )
        self.weights = weights
        self.memory = SlotMemory.anonymous(SLOTS, BLOCK_BYTES)
        self.facade = open_runtime(config, self.memory, Namespace({"model": "m"}))
        self.requests = 0

    def bytes_of(self, key: bytes) -> bytes:
        return bytes([key[0], self.weights]) * (BLOCK_BYTES // 2)

    def step(self) -> None:
        self.facade.step_end()
        pause()

    def new_request(self) -> str:
        self.requests += 1
        self.facade.on_request_started(f"r{self.requests}")
        return f"r{self.requests}"

    def store(self, keys: list[bytes]) -> None:
        request = self.new_request()
        grant = self.facade.prepare_store(keys, request)
        assert grant is not None
        for key, slot in zip(grant.keys, grant.slots, strict=True):
            self.memory.view(slot)[:] = self.bytes_of(key)
        self.facade.complete_store(grant.keys, request, epoch=grant.epoch)
        self.facade.on_request_finished(request)
        for _ in looks(self.facade.statistics):
            if not self.facade.has_pending_work():
                return
            self.step()

    def hits(self, keys: list[bytes]) -> int:
        """Return how many blocks are served; all were computed with today's weights."""
        request = self.new_request()
        for _ in looks(self.facade.statistics):
            if (found := self.facade.lookup_prefix(keys, request)) is not None:
                break
            self.step()
        assert found is not None
        slots, epoch = self.facade.prepare_load(keys[:found], request), self.facade.epoch
        for key, slot in zip(keys, slots, strict=False):
            assert self.memory.view(slot) == self.bytes_of(key), "computed with other weights"
        self.facade.complete_load(keys[:found], request, epoch=epoch)
        self.facade.on_request_finished(request)
        return found

    def reset(self, weights: int, **how: str) -> None:
        self.facade.reset(**how)
        self.facade.on_reset_flushed()
        self.weights = weights

    def known(self, keys: list[bytes], count: int) -> None:
        """Wait until the tier has told of so much that it has from before."""
        for _ in looks(self.facade.statistics):
            if self.hits(keys) >= count:
                return
            self.step()
            self.empty_dram()

    def empty_dram(self) -> None:
        self.facade._ask(m.Reset())
        self.facade.on_reset_flushed()


@pytest.fixture(params=["memory", "fs", "disk", "disk in a thread"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[dict[str, Any]]:
    kind = request.param.split()[0]
    if kind == "memory":
        yield {"type": "memory", "capacity_bytes": 64 * BLOCK_BYTES}
    elif kind == "fs":
        yield {"type": "fs", "root_dir": str(tmp_path / "kv"), "isolation": "thread"}
    else:
        cell = "thread" if "thread" in request.param else "process"
        yield {
            "type": "disk",
            "path": str(tmp_path / "kv"),
            "capacity_bytes": 4 << 20,
            "isolation": cell,
        }


def test_nothing_from_before_a_reset_is_served_and_what_is_stored_after_it_is(
    tier: dict[str, Any],
) -> None:
    """80 of 80 tokens were read with the KV data of the weights before."""
    engine = Engine(tier, weights=1)
    engine.store(KEYS)
    engine.reset(weights=2)
    assert engine.hits(KEYS) == 0
    engine.store(KEYS)
    engine.empty_dram()  # the tier serves what it has
    assert engine.hits(KEYS) == len(KEYS)
    assert engine.facade.close() is True


def test_a_restart_finds_the_models_own_weights_and_no_others(tier: dict[str, Any]) -> None:
    if tier["type"] == "memory":
        return
    engine = Engine(tier, weights=1)
    engine.store(KEYS[:4])
    engine.reset(weights=2)
    engine.store(KEYS)
    assert engine.facade.close() is True
    engine = Engine(tier, weights=1)
    engine.known(KEYS, 4)
    assert engine.facade.close() is True


def test_engines_and_restarts_that_name_the_same_weights_share(tier: dict[str, Any]) -> None:
    if tier["type"] == "memory":
        return
    engine = Engine(tier, weights=1)
    engine.store(KEYS[:2])
    engine.reset(weights=7, weights_version="step 7")
    engine.store(KEYS[:4])
    assert engine.facade.close() is True
    engine = Engine(tier, weights=7, weights_version="step 7")
    engine.known(KEYS, 4)
    engine.reset(weights=8, weights_version="step 8")
    assert engine.hits(KEYS) == 0
    engine.reset(weights=7, weights_version="step 7")
    engine.known(KEYS, 4)
    assert engine.facade.close() is True


def test_keep_empties_dram_only(tier: dict[str, Any]) -> None:
    engine = Engine(tier, weights=1, on_reset="keep")
    engine.store(KEYS)
    engine.reset(weights=1)
    assert engine.hits(KEYS) == len(KEYS)
    assert engine.facade.close() is True


def test_a_bounded_tier_takes_the_room_of_old_generations_back() -> None:
    """However often the weights change, it holds as much of the last ones as it can."""
    tier = {"type": "memory", "capacity_bytes": 8 * BLOCK_BYTES, "eviction_policy": "lru"}
    engine = Engine(tier, weights=0)
    for weights in range(5):
        engine.store(KEYS)
        engine.reset(weights=weights + 1)
    engine.store(KEYS)
    engine.empty_dram()
    assert engine.hits(KEYS) == 8
    assert engine.facade.statistics().tiers[0].counts.stores_rejected == 0
    assert engine.facade.close() is True


def test_what_nobody_finds_any_more_is_removed_and_what_has_a_name_stays(tmp_path: Path) -> None:
    """A folder without a capacity grew with each change of the weights, for ever.

    Once the weights change again, or the engine ends, what had no name is gone.
    """
    folder = tmp_path / "kv"
    engine = Engine({"type": "fs", "root_dir": str(folder), "isolation": "thread"}, weights=1)

    def there() -> set[Path]:
        return set(folder.rglob("*.kv"))

    engine.store(KEYS)
    original = there()
    engine.reset(weights=2)
    engine.store(KEYS[:4])
    unnamed = there() - original
    assert len(unnamed) == 4
    engine.reset(weights=3, weights_version="step 3")
    engine.store(KEYS[:2])
    for _ in looks(engine.facade.statistics):
        if not there() & unnamed:
            break
        engine.step()
    named = there() - original
    assert len(named) == 2
    engine.reset(weights=4)
    engine.store(KEYS[:3])
    assert len(there() - original - named) == 3
    assert engine.facade.close() is True
    assert there() == original | named


class Cell:
    """A runtime in a test cell, over one tier that holds four blocks."""

    def __init__(self) -> None:
        config = RuntimeConfig(
            slot_count=8,
            block_bytes=16,
            cascade_slots_fraction_max=1.0,
            tiers=(TierConfig("t", "1:t", enable_kv_events=True),),
        )
        tiers = [(BackendTraits(1, 1, 4), LRUPolicy(4))]
        self.runtime = open_test_runtime(config, LRUPolicy(8), tiers, clock=lambda: 0.0)
        self.facade = self.runtime.facade
        self.tier = self.runtime.tiers[0]

    def answer(self) -> list[tuple[bytes, ...]]:
        """Have the backend do all it is asked for; return what that was."""
        asked = []
        self.runtime.cell.settle()
        while self.tier.batches:
            batch = self.tier.batches[0]
            asked.append(batch.keys)
            self.tier.answer(batch, [Outcome.DONE] * len(batch.keys))
            self.runtime.cell.settle()
        return asked

    def store(self, keys: list[bytes]) -> list[tuple[bytes, ...]]:
        self.facade.on_request_started("w")
        grant = self.facade.prepare_store(keys, "w")
        assert grant is not None
        self.facade.complete_store(grant.keys, "w", epoch=grant.epoch)
        self.facade.on_request_finished("w")
        return self.answer()

    def look_up(self) -> bool | None:
        """Look a block up, let the tier answer whether it has it, and look again."""
        self.facade.on_request_started("r")
        self.facade.lookup(KEYS[0], "r")
        self.facade.step_end()
        self.runtime.cell.settle()
        found = self.facade.lookup(KEYS[0], "r")
        self.facade.on_request_finished("r")
        return found


def test_an_answer_to_what_was_asked_before_a_reset_says_nothing_about_after_it() -> None:
    cell = Cell()
    cell.store(KEYS[:1])
    cell.runtime.primary._directory.forget_tier(0)
    cell.facade.reset(weights_version="0")  # DRAM is empty, and the tier too ...
    cell.store(KEYS[:1])
    cell.runtime.primary._directory.forget_tier(0)
    cell.facade.on_request_started("r")
    cell.facade._ask(m.Reset())
    assert cell.facade.lookup(KEYS[0], "r") is None
    cell.facade.step_end()
    cell.runtime.cell.deliver(cell.tier.mailbox)  # ... but for this probe, which is answered
    cell.facade.reset()
    assert cell.facade.lookup(KEYS[0], "r") is None, "it is asked again"
    cell.facade.step_end()
    cell.runtime.cell.settle()
    assert cell.facade.lookup(KEYS[0], "r") is False


def test_a_tier_that_could_not_be_told_of_a_reset_finds_nothing_old_all_the_same() -> None:
    cell = Cell()
    cell.store(KEYS[:1])
    cell.tier.is_full = True
    cell.facade.reset()
    cell.tier.is_full = False
    assert cell.look_up() is False
    (stored,) = cell.store(KEYS[:1])
    assert mark_of(stored[0]) == cell.facade._generations.mark != ORIGINAL


def test_a_store_that_began_before_a_reset_ends_as_one_of_its_own_generation() -> None:
    cell = Cell()
    cell.facade.on_request_started("w")
    grant = cell.facade.prepare_store(KEYS[:1], "w")
    assert grant is not None
    cell.facade.complete_store(grant.keys, "w", epoch=grant.epoch)
    cell.runtime.cell.settle()
    cell.facade.reset()
    cell.facade.on_reset_flushed()
    assert cell.answer() == [(KEYS[0],)], "its key has no mark"
    assert cell.look_up() is False
    assert len(cell.tier.bounded._old) == 1
    assert cell.facade.statistics().primary.quarantined_slots == 0


def test_events_say_that_a_tier_has_nothing_after_a_reset() -> None:
    cell = Cell()
    cell.store(KEYS[:2])
    cell.facade.reset()
    last = [event for event in cell.facade.take_events() if event.tier == 0][-1]
    assert last.kind is EventKind.CLEARED
