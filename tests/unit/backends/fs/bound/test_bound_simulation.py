"""The protocol of the bound, over a folder in memory: every order of steps, kills, old views."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvtier_backends.fs.bound import cleaner
from kvtier_backends.fs.bound.account import Account
from kvtier_backends.fs.bound.protocol import clear
from kvtier_backends.fs.bound.writer import Grant, Grants
from tests.support.examples import examples
from tests.unit.backends.fs.bound._simulation import FILE_BYTES, Engine, World

if TYPE_CHECKING:
    from kvtier_backends.fs.bound.protocol import Array, Folder

CAPACITY = 40 * FILE_BYTES
ENGINES = 3
PAUSES_S = (0.0, 0.001, 0.02, 0.3)
STEPS = 4000
CALM_STEPS = 30_000
CALM_PAUSE_S = 0.02
SEEDS_MAX = 200


class FolderTooFull(AssertionError):
    """The promise is broken."""


def step(world: World, engines: list[Engine], chance: Random) -> None:
    """Let one engine go on for a while, and measure after every call of its."""
    engine = chance.choice(engines)
    for _ in range(chance.randrange(1, 12)):
        engine.step()
        if world.bytes() > world.capacity:
            raise FolderTooFull(f"{world.bytes()} of {world.capacity} bytes")
    world.time += chance.random() * world.pause_s


def storm(chance: Random, steps: int = STEPS, *, full: float = 0.0) -> tuple[World, list[Engine]]:
    """Run engines, stop them for long, kill them and start others.

    ``full``: how often there is no room for what one writes.
    """
    world = World(chance, CAPACITY, pause_s=chance.choice(PAUSES_S), full=full)
    engines = [Engine(world) for _ in range(ENGINES)]
    stopped: list[Engine] = []
    for _ in range(steps):
        happens = chance.random()
        if happens < 0.001:
            engines[chance.randrange(len(engines))] = Engine(world)
        elif happens < 0.003 and len(engines) > 1:
            stopped.append(engines.pop(chance.randrange(len(engines))))
        elif happens < 0.006 and stopped:
            engines.append(stopped.pop(chance.randrange(len(stopped))))
        elif happens < 0.008:
            world.time += 100.0
        step(world, engines, chance)
    return world, engines


@settings(max_examples=examples(15))
@given(seed=st.integers(0, 1 << 32))
def test_the_folder_never_holds_more_than_its_bound(seed: int) -> None:
    storm(Random(seed))


@settings(max_examples=examples(8))
@given(seed=st.integers(0, 1 << 32), full=st.sampled_from([0.02, 0.3]))
def test_nor_where_the_filesystem_is_full_now_and_then(seed: int, full: float) -> None:
    """Blocks are evicted then before a term is fenced, and beside what the account asks for."""
    storm(Random(seed), full=full)


@pytest.mark.slow
@settings(max_examples=examples(6))
@given(seed=st.integers(0, 1 << 32))
@example(seed=140)  # a term was made by an engine that died then, beside one that led on
@example(seed=61043)
def test_nobody_starves_for_ever(seed: int) -> None:
    """Once nothing is killed or stopped any more, each engine stores again."""
    chance = Random(seed)
    world, engines = storm(chance, 1500)
    before = {engine: engine.stored for engine in engines}
    world.pause_s = CALM_PAUSE_S
    for _ in range(CALM_STEPS):
        step(world, engines, chance)
        if all(engine.stored > stored + 3 for engine, stored in before.items()):
            return
    pytest.fail(f"after {CALM_STEPS} steps: {[(e.name, e.stored) for e in engines]}")


# --- the simulation finds mistakes ---


async def _fences_nothing(parent: Folder, name: str) -> None:
    if name.startswith("grant-"):
        await clear(parent, name)


async def _removes_no_grant(parent: Folder, name: str) -> None:
    if not name.startswith("grant-"):
        await clear(parent, name)


def _counts_half(self: Account, size: int) -> None:
    self.granted += size // 2


def _forgets_what_was_revoked(self: Account, size: int) -> None:
    self.granted -= size


def _ignores_what_is_in_flight(self: Grants) -> list[Grant]:
    return [grant for grant in self._grants if grant.is_spent]


def _notes_nothing(_self: Account) -> None:
    return


def _takes_the_first(receipts: list[tuple[int, Array]]) -> tuple[int, Array]:
    return sum(size for size, _ in receipts), receipts[0][1]


MISTAKES = {
    "older terms are not fenced": (cleaner, "clear", _fences_nothing),
    "a dead writer's grant is not removed": (cleaner, "clear", _removes_no_grant),
    "grants count half": (Account, "grant", _counts_half),
    "what a revoked grant stored is forgotten": (Account, "lose", _forgets_what_was_revoked),
    "a receipt is written too early": (Grants, "finished", _ignores_what_is_in_flight),
    "of a round's receipts one is taken": (cleaner, "joined", _takes_the_first),
    "what is stored while it is evicted is forgotten": (
        Account,
        "eviction_begins",
        _notes_nothing,
    ),
}

QUICK = ("grants count half", "what is stored while it is evicted is forgotten")


def _storms() -> None:
    for seed in range(SEEDS_MAX):
        storm(Random(seed))


@pytest.mark.slow
@pytest.mark.parametrize(
    "mistake",
    # Two of them show in the gate that the simulation finds mistakes; some take hundreds of storms.
    [each if each in QUICK else pytest.param(each, marks=pytest.mark.long) for each in MISTAKES],
)
def test_the_simulation_finds_a_planted_mistake(
    mistake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(*MISTAKES[mistake])
    with pytest.raises(AssertionError):  # that of the folder, or the cleaner's own
        _storms()
