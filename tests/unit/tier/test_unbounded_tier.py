"""A tier that others change too: what it says is there, and what it finds to be gone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvtier.core import wire
from kvtier.core.generations import Generations, mark_of_name, marked
from kvtier.tier import dead_blocks
from kvtier.tier import driver_messages as d
from kvtier.tier.bounded_tier import BoundedTier
from tests.unit.tier.test_secondary_tier import ABSENT, DAMAGED, DONE, FAILED, Bench

if TYPE_CHECKING:
    from kvtier.plugin_api.backend import Outcome
    from kvtier.tier.unbounded_tier import UnboundedTier

A, B, C = b"a0000000", b"b0000000", b"c0000000"
FIRST, SECOND = mark_of_name("first"), mark_of_name("second")


def told_gone(bench: Bench) -> list[tuple[bytes, ...]]:
    """Return what was told of losses, in the order of the answers."""
    said = [each for each in bench.said() if isinstance(each, wire.PresenceChanged)]
    assert not any(each.added for each in said)
    return [each.removed for each in said]


def unnamed() -> bytes:
    mark = Generations().begin(None)
    assert mark is not None
    return mark


def store(bench: Bench, *given: bytes, mark: bytes, since: int) -> None:
    bench.jobs += 1
    bench.send(wire.StoreJob(bench.jobs, "r", given, tuple(range(len(given))), mark, since))


def removals(bench: Bench) -> list[tuple[bytes, ...]]:
    """Return what the backend is to remove now."""
    return [each.keys for each in bench.tier.batches if isinstance(each, d.RemoveBatch)]


def load(bench: Bench, *wanted: bytes, mark: bytes, since: int) -> None:
    bench.send(wire.LoadJob(1, wanted, tuple(range(len(wanted))), mark, since))


@pytest.mark.parametrize("outcome", [ABSENT, DAMAGED])
def test_what_a_load_does_not_find_is_told_as_gone(outcome: Outcome) -> None:
    """Damaged blocks are removed. Whoever was told of them would ask for them for ever."""
    bench = Bench(batches_max=1)
    bench.load(A, B)
    bench.tier.answer(bench.tier.batches[0], [DONE, outcome])
    bench.run()
    assert told_gone(bench) == [(B,)]


@pytest.mark.parametrize("outcome", [DONE, FAILED])
def test_a_load_that_says_nothing_of_the_block_tells_nothing(outcome: Outcome) -> None:
    bench = Bench()
    bench.load(A)
    bench.answer(outcome)
    assert told_gone(bench) == []


def test_a_store_that_found_a_block_which_a_load_then_removed_is_told_as_lost() -> None:
    """The block was there when the store looked: it is done, and the block is gone."""
    bench = Bench(batches_max=1)
    bench.load(A)
    bench.store(A, B)
    bench.answer(DAMAGED, batch=0)
    bench.said()
    bench.answer(DONE)
    ended, changed = bench.said()
    assert isinstance(ended, wire.JobEnded)
    assert ended.outcomes == (DONE, DONE)
    assert changed == wire.PresenceChanged((), (A,), 0), "after its end, which says it is there"


def test_a_part_of_a_store_that_ended_before_the_loss_is_lost_as_well() -> None:
    """It is told of with the last part only."""
    bench = Bench(batches_max=2)
    bench.load(A)
    bench.store(A, B)
    bench.answer(DONE, batch=1)
    bench.answer(DAMAGED, batch=0)
    assert told_gone(bench) == [(A,)]
    bench.answer(DONE)
    assert told_gone(bench) == [(A,)]


def test_a_store_that_began_after_the_loss_is_not_lost() -> None:
    bench = Bench()
    bench.load(A)
    bench.answer(DAMAGED)
    assert told_gone(bench) == [(A,)]
    bench.store(A)
    bench.answer(DONE)
    assert told_gone(bench) == []


def test_a_probe_that_found_a_block_which_a_load_then_removed_says_no() -> None:
    bench = Bench()
    bench.load(A)
    bench.send(wire.Probe(probe=7, keys=(A, B)))
    bench.answer(DAMAGED, batch=0)
    bench.said()
    bench.tier.answer(bench.tier.batches[0], [DONE, DONE])
    bench.run()
    assert bench.said() == [wire.ProbeAnswer(probe=7, present=(False, True))]


def test_what_the_backend_loses_is_told_as_gone() -> None:
    """A backend without a capacity may say so too."""
    bench = Bench()
    bench.store(A)
    bench.send(d.ContentsLost(keys=(A, C)))
    assert told_gone(bench) == [(A, C)]
    bench.answer(DONE)
    assert told_gone(bench) == [(A,)]


def test_what_is_gone_of_another_generation_is_not_told_of() -> None:
    """Nobody was told of it: with a generation, all that was told is taken back."""
    bench = Bench()
    load(bench, A, mark=FIRST, since=1)
    bench.send(wire.GenerationBegan(2, SECOND))
    bench.answer(DAMAGED)
    assert told_gone(bench) == []


@pytest.mark.parametrize("how", ["said", "with a probe", "with a job"])
def test_what_is_gone_of_a_generation_that_was_come_back_to_is_told_in_it(how: str) -> None:
    """By name both are the same blocks, and it is told again what there is of them."""
    bench = Bench()
    load(bench, A, mark=FIRST, since=1)
    bench.send(wire.GenerationBegan(2, SECOND))
    if how == "said":
        bench.send(wire.GenerationBegan(3, FIRST))
    elif how == "with a probe":  # a full mailbox took nothing else
        bench.send(wire.Probe(7, (B,), FIRST, 3))
    else:
        bench.send(wire.StoreJob(8, "r", (B,), (5,), FIRST, 3))
    bench.answer(DAMAGED, batch=0)
    (gone,) = [each for each in bench.said() if isinstance(each, wire.PresenceChanged)]
    assert gone == wire.PresenceChanged((), (A,), 3)


def test_a_store_of_another_generation_says_nothing_of_this_one() -> None:
    """Its blocks have another name."""
    bench = Bench()
    load(bench, A, mark=FIRST, since=1)
    bench.send(wire.StoreJob(2, "r", (A,), (5,), SECOND, 2))
    bench.answer(DAMAGED, batch=0)
    (batch,) = bench.tier.batches
    assert batch.keys == marked((A,), SECOND)
    bench.answer(DONE)
    assert told_gone(bench) == []


# --- weights without a name ---


def test_blocks_of_weights_without_a_name_are_removed_once_the_weights_change_again() -> None:
    """A store that ends only then is of the old weights as well. What failed is not there."""
    bench = Bench(batches_max=1)
    first, second = unnamed(), unnamed()
    store(bench, A, mark=first, since=1)
    bench.answer(DONE)
    store(bench, B, mark=first, since=1)
    bench.answer(FAILED)
    store(bench, C, mark=first, since=1)
    assert removals(bench) == []
    bench.send(wire.GenerationBegan(2, second))
    assert removals(bench) == [marked((A,), first)]
    bench.answer(DONE, batch=0)
    assert removals(bench) == [marked((A,), first)], "one batch at a time"
    end(bench, DONE)
    assert removals(bench) == [marked((C,), first)]


@pytest.mark.parametrize("mark", [b"", FIRST])
def test_blocks_of_weights_with_a_name_stay(mark: bytes) -> None:
    bench = Bench()
    store(bench, A, mark=mark, since=1)
    bench.answer(DONE)
    bench.send(wire.GenerationBegan(2, unnamed()))
    actor(bench).finish()
    bench.run()
    assert removals(bench) == []


def test_an_engine_that_ends_removes_what_nobody_will_find_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Storage that is slow does not hold up its end."""
    monkeypatch.setattr(dead_blocks, "REMOVE_BLOCKS_MAX", 1)
    bench, mark = Bench(), unnamed()
    store(bench, A, B, C, mark=mark, since=1)
    while bench.tier.batches:
        bench.answer(DONE)
    for _ in range(2):
        actor(bench).finish()
    bench.run()
    assert not actor(bench).is_idle()
    assert removals(bench) == [marked((A,), mark)]
    end(bench, FAILED, at=0.5)
    assert removals(bench) == [marked((B,), mark)], "what failed is not tried again"
    end(bench, DONE, at=99.0)
    assert removals(bench) == []
    assert actor(bench).is_idle()


def test_only_so_many_are_known_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dead_blocks, "KEYS_MAX", 2)
    dead, mark = dead_blocks.DeadBlocks(), unnamed()
    dead.stored(marked((A, B, C), mark), mark, mark)
    dead.leave()
    assert dead.begin_removal() == marked((B, C), mark)


def actor(bench: Bench) -> UnboundedTier:
    made = bench.tier.actor
    assert not isinstance(made, BoundedTier)
    return made


def end(bench: Bench, outcome: Outcome, at: float = 0.0) -> None:
    """Have a removal end."""
    batch = next(each for each in bench.tier.batches if isinstance(each, d.RemoveBatch))
    bench.tier.answer(batch, [outcome] * len(batch.keys), at=at)
    bench.run()
