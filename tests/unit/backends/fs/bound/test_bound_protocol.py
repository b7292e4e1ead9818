"""Single promises of the bound's protocol, over a folder in memory and one grant."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

import pytest

from kvtier_backends.fs.bound.account import Account, Manifest, Scanned, empty
from kvtier_backends.fs.bound.protocol import MANIFEST, GrantName, Location
from kvtier_backends.fs.bound.writer import Demand, Grant, Grants, NoGrant, as_array
from tests.unit.backends.fs.bound._simulation import FILE_BYTES, Engine, Node, SimFolder, World

if TYPE_CHECKING:
    from collections.abc import Callable

CAPACITY = 40 * FILE_BYTES
TURNS_MAX = 200_000


@pytest.fixture
def world() -> World:
    return World(Random(1), CAPACITY, pause_s=0.02)


def run(world: World, engine: Engine, done: Callable[[], bool]) -> None:
    """Let one engine work, within the capacity, until something has come."""
    for _ in range(TURNS_MAX):
        engine.step()
        assert world.bytes() <= CAPACITY
        world.time += 0.005
        if done():
            return
    pytest.fail("it never came")


def test_a_new_cleaner_grants_before_it_has_counted(world: World) -> None:
    """It goes on with the manifest: what it removes makes room, though nobody has counted yet."""
    first = Engine(world)
    run(world, first, lambda: first.stored > 100 and MANIFEST in world.space.files)
    second = Engine(world)
    second.cleaner._hands.begin_scan = lambda _epoch, _duty: None
    run(world, second, lambda: second.stored > 5)
    assert second.cleaner.leads
    assert not second.cleaner.account.is_counted


def test_a_new_folder_is_counted_before_anything_is_stored(world: World) -> None:
    """Nobody knows what is there."""
    engine = Engine(world)
    engine.cleaner._hands.begin_scan = lambda _epoch, _duty: None
    for _ in range(20_000):
        engine.step()
        world.time += 0.005
    assert engine.cleaner.leads
    assert engine.stored == 0


def test_nothing_is_stored_with_a_grant_that_has_a_receipt(world: World) -> None:
    grants = Grants()
    folder = SimFolder(Node(), Engine(world))
    grants.add(Grant(GrantName("w", 1, 3 * FILE_BYTES), folder, 3 * FILE_BYTES))
    grant = grants.begin(FILE_BYTES)
    grants.spend_all()
    assert grants.finished() == [], "a store is under way"
    with pytest.raises(NoGrant):
        grants.begin(FILE_BYTES)
    grants.end(grant, Location(1, 1), FILE_BYTES, 0)
    assert grants.finished() == [grant]
    assert grant.stored == [(Location(1, 1), FILE_BYTES)]


def test_a_grant_is_good_for_its_bytes_and_no_more(world: World) -> None:
    grants = Grants()
    folder = SimFolder(Node(), Engine(world))
    grants.add(Grant(GrantName("w", 1, 25), folder, 25))
    left, kept = grants.begin(FILE_BYTES), grants.begin(FILE_BYTES)
    grants.give_up(left, 0)
    grants.give_up(kept, FILE_BYTES)
    assert grants.begin(FILE_BYTES) is kept
    with pytest.raises(NoGrant):
        grants.begin(FILE_BYTES)


def test_a_block_that_two_engines_stored_counts_once_when_it_is_known() -> None:
    account = Account(1000)
    account.scan_begins()
    account.scan_ended(Scanned(empty(), 0))
    for _ in range(2):
        account.grant(100)
        account.settle(100, as_array([(7, 0, 60)]))
    assert account.bound == 60


def test_before_the_first_scan_only_what_was_removed_makes_room() -> None:
    account = Account(1000)
    manifest = Manifest()
    manifest.add(as_array([(7, 0, 60), (8, 0, 60)]), 1)
    account.begin_from(manifest, 1, holds=True)
    assert account.bound == 1000
    account.removed(as_array([(7, 0, 60)])["block"], 0)
    assert account.bound == 1000, "it was gone before: nobody knows what has taken its place"
    account.removed(as_array([(8, 0, 60)])["block"], 60)
    assert account.bound == 940


def test_a_block_that_was_stored_again_while_it_was_evicted_stays_known() -> None:
    """Whether the file that was removed is the old one or the new one, nobody knows."""
    account = Account(1000)
    account.scan_begins()
    account.scan_ended(Scanned(empty(), 0))
    account.grant(20)
    account.settle(20, as_array([(1, 0, 10), (2, 0, 10)]))
    account.eviction_begins()
    account.grant(10)
    account.settle(10, as_array([(1, 0, 10)]))
    account.removed(as_array([(1, 0, 10), (2, 0, 10)])["block"], 20)
    assert account.manifest.entries["block"].tolist() == [1]
    assert account.bound == 10


def test_a_writer_wants_what_it_stored_in_the_last_second_and_had_no_room_for() -> None:
    demand = Demand(1.0)
    assert demand.note(0.0, 30, 5)
    assert demand.note(0.5, 20, 7)
    assert demand.bytes() == 30 + 20 + 7
    assert not demand.note(1.2, 0, 0)
    assert demand.bytes() == 20 + 7


def test_what_changes_during_a_scan_counts_after_it() -> None:
    account = Account(1000)
    account.scan_begins()
    account.grant(50)
    account.settle(50, as_array([(1, 0, 10), (2, 0, 10)]))
    account.removed(as_array([(2, 0, 10)])["block"], 10)
    account.grant(30)
    account.lose(30)
    account.scan_ended(Scanned(Manifest().entries, 5))
    assert account.bound == 10 + 30 + 5
    account.scan_begins()
    account.scan_ended(Scanned(empty(), 0))
    assert account.bound == 0
