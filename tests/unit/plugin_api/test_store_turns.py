"""Stores that have begun pause for loads, and neither starve nor wait for what hangs."""

from __future__ import annotations

import threading
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING

import pytest

from kvtier.plugin_api import store_turns
from kvtier.plugin_api.store_turns import LINGERING_BATCHES, StoreTurns
from kvtier.plugin_api.threads import daemon_thread
from tests.support.patience import PATIENCE_S, until

if TYPE_CHECKING:
    from collections.abc import Iterator

BLOCKS = 3
BEGIN = 1000.0  #: in seconds of a clock


class Writers:
    """Threads that store a batch each. Each block waits at the batch's gate, then for its turn."""

    def __init__(self, turns: StoreTurns, batches: str) -> None:
        self.stored: list[str] = []  #: of each block its batch, in order
        self._turns = turns
        self._gates = {batch: threading.Semaphore(0) for batch in batches}
        self._threads = {}
        for batch in batches:  # one begins after the other
            began = threading.Event()
            self._threads[batch] = daemon_thread(partial(self._store, batch, began), batch)
            self._threads[batch].start()
            assert began.wait(PATIENCE_S)

    def _store(self, batch: str, began: threading.Event) -> None:
        with self._turns.storing() as wait_for_turn:
            began.set()
            for _ in range(BLOCKS):
                assert self._gates[batch].acquire(timeout=PATIENCE_S)
                wait_for_turn()
                self.stored.append(batch)

    def open(self, batches: str, blocks: int = BLOCKS) -> None:
        """Let so many more blocks of each of these batches through its gate."""
        for batch in batches:
            self._gates[batch].release(blocks)

    def join(self, batches: str) -> None:
        """Wait until these batches have ended."""
        for batch in batches:
            self._threads[batch].join(PATIENCE_S)
            assert not self._threads[batch].is_alive()


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_turns, "HELD_S_MAX", PATIENCE_S)
    monkeypatch.setattr(store_turns, "LINGER_S", 0.0)


@contextmanager
def storing(turns: StoreTurns, batches: str) -> Iterator[Writers]:
    """Give batches that have begun, and see that they end."""
    writers = Writers(turns, batches)
    yield writers
    writers.open(batches)
    writers.join(batches)
    assert len(writers.stored) == BLOCKS * len(batches)


def test_while_anything_is_loaded_only_the_oldest_batch_goes_on() -> None:
    turns = StoreTurns()
    with storing(turns, "abcd") as writers:
        with turns.loading():
            writers.open("bcd")
            writers.open("a", BLOCKS - 1)
            until(lambda: len(writers.stored) >= BLOCKS - 1)
            assert writers.stored == ["a"] * (BLOCKS - 1)
        writers.join("bcd")
        assert writers.stored.count("a") == BLOCKS - 1


def test_for_a_while_after_a_load_few_batches_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_turns, "LINGER_S", PATIENCE_S)
    turns = StoreTurns()
    few, others = "abcdefg"[:LINGERING_BATCHES], "abcdefg"[LINGERING_BATCHES:]
    with storing(turns, few + others) as writers:
        with turns.loading():
            pass
        writers.open(others)
        writers.open(few, BLOCKS - 1)
        until(lambda: len(writers.stored) >= len(few) * (BLOCKS - 1))
        assert set(writers.stored) == set(few)
        writers.open(few, 1)
        writers.join(few + others)


def test_under_loads_without_end_each_batch_has_its_turn_in_order() -> None:
    turns = StoreTurns()
    with storing(turns, "abc") as writers, turns.loading():
        writers.open("cba")
        writers.join("abc")
        assert writers.stored == ["a"] * BLOCKS + ["b"] * BLOCKS + ["c"] * BLOCKS


def test_neither_a_load_nor_a_batch_that_hangs_holds_others_back_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(store_turns, "HELD_S_MAX", 0.0)
    turns = StoreTurns()
    with storing(turns, "abc") as writers, turns.loading():
        writers.open("bc")
        writers.join("bc")


class Clock:
    """What the module reads the time from."""

    def __init__(self) -> None:
        self.now = BEGIN

    def monotonic(self) -> float:
        return self.now


@pytest.mark.parametrize(("load_s", "pause_s"), [(1000.0, 0.0), (0.01, 0.01), (0.3, 0.2)])
def test_loads_without_end_hold_stores_back_for_half_of_the_time(
    load_s: float, pause_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_turns, "HELD_S_MAX", 1.0)
    monkeypatch.setattr(store_turns, "LINGER_S", 0.5)
    assert share_held(monkeypatch, load_s, pause_s) == pytest.approx(0.5, abs=0.05)


def test_loads_that_are_few_are_always_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """And after each of them few batches go on for half a second."""
    monkeypatch.setattr(store_turns, "HELD_S_MAX", 1.0)
    monkeypatch.setattr(store_turns, "LINGER_S", 0.5)
    assert share_held(monkeypatch, 0.1, 1.1) == pytest.approx(0.6 / 1.2, abs=0.02)


def share_held(monkeypatch: pytest.MonkeyPatch, load_s: float, pause_s: float) -> float:
    """Return for what share of 60 s the latest of some batches is held back."""
    clock, tick_s, held, ticks = Clock(), 0.01, 0, 6000
    monkeypatch.setattr(store_turns, "time", clock)
    turns = StoreTurns()
    load = ExitStack()
    is_loading = False
    with ExitStack() as batches, load:
        for _ in range(2 * LINGERING_BATCHES):
            batches.enter_context(turns.storing())
        for tick in range(ticks):
            wanted = tick % round((load_s + pause_s) / tick_s) < round(load_s / tick_s)
            if wanted and not is_loading:
                load.enter_context(turns.loading())
            elif not wanted:
                load.close()
            is_loading = wanted
            held += turns._pause_s(2 * LINGERING_BATCHES - 1, clock.now) > 0
            clock.now += tick_s
    return held / ticks
