"""Loads before stores; and stores go on, whatever the loads do."""

from __future__ import annotations

import pytest

from kvtier.tier import driver_messages as d
from tests.unit.tier.test_secondary_tier import Bench, keys

CAPACITIES = [None, 64]


def under_way(bench: Bench) -> dict[str, int]:
    """Return how many calls of each kind run."""
    kinds = [type(batch) for batch in bench.tier.batches]
    return {"loads": kinds.count(d.LoadBatch), "stores": kinds.count(d.StoreBatch)}


def end(bench: Bench, kind: type[d.LoadBatch | d.StoreBatch]) -> None:
    """End the call of that kind that began first."""
    first = next(i for i, batch in enumerate(bench.tier.batches) if isinstance(batch, kind))
    bench.answer(batch=first)


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_beside_a_load_a_quarter_of_the_stores_goes_on(capacity: int | None) -> None:
    bench = Bench(batches_max=8, capacity=capacity)
    bench.load(*keys(1, "l"))
    for number in range(8):
        bench.store(*keys(1, f"{number}:"))
    assert under_way(bench) == {"loads": 1, "stores": 2}
    end(bench, d.LoadBatch)
    assert under_way(bench) == {"loads": 0, "stores": 8}


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_stores_that_began_before_a_load_count_towards_their_share(capacity: int | None) -> None:
    bench = Bench(batches_max=8, capacity=capacity)
    for number in range(10):
        bench.store(*keys(1, f"{number}:"))
    bench.load(*keys(1, "l"))
    assert under_way(bench) == {"loads": 1, "stores": 8}
    for left in (7, 6, 5, 4, 3, 2, 2, 2, 1):
        end(bench, d.StoreBatch)
        assert under_way(bench)["stores"] == left


def test_under_loads_without_end_every_store_has_its_turn_in_order() -> None:
    """There is a load at any moment: the next one waits before the last one ends."""
    bench = Bench(batches_max=1)
    bench.load(*keys(1, "l"))
    stored = []
    for number in range(4):
        bench.store(*keys(16, f"{number}:"))
    for _ in range(4):
        bench.load(*keys(1, "l"))
        (store,) = [each for each in bench.tier.batches if isinstance(each, d.StoreBatch)]
        stored.append(store.keys[0][:1])
        end(bench, d.StoreBatch)
        end(bench, d.LoadBatch)
    assert stored == [b"0", b"1", b"2", b"3"]


def test_a_load_that_waits_holds_stores_back_as_well() -> None:
    bench = Bench(batches_max=4)
    bench.load(*keys(64, "l"))
    for number in range(4):
        bench.store(*keys(1, f"{number}:"))
    for _ in range(4):
        end(bench, d.LoadBatch)
        assert under_way(bench)["stores"] == 1


def test_the_share_of_stores_is_one_at_least() -> None:
    bench = Bench(batches_max=2)
    bench.load(*keys(1, "l"))
    bench.store(*keys(1, "s"))
    assert under_way(bench) == {"loads": 1, "stores": 1}


def test_requests_that_have_calls_of_their_own_do_not_wait_for_one_another() -> None:
    """What one of them loads may be what another engine waits for in a store of this one."""
    bench = Bench(batches_max=4, request_scoped=True)
    bench.load(*keys(1, "l"))
    for number in range(4):
        bench.store(*keys(1, f"{number}:"))
    assert under_way(bench) == {"loads": 1, "stores": 4}
