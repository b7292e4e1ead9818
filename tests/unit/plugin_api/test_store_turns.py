"""Stores that have begun pause for loads, and neither starve nor wait for what hangs."""

from __future__ import annotations

import threading
from contextlib import contextmanager
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
    monkeypatch.setattr(store_turns, "PAUSE_S_MAX", PATIENCE_S)
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
    """And once a pause has been as long as it may be, nobody waits for them again."""
    turns = StoreTurns()
    with storing(turns, "abc") as writers, turns.loading():
        with monkeypatch.context() as hurry:
            hurry.setattr(store_turns, "PAUSE_S_MAX", 0.0)
            writers.open("b", 1)
            until(lambda: writers.stored == ["b"])
        writers.open("b", BLOCKS - 1)
        writers.open("c")  # and not of the oldest
        writers.join("bc")


def test_a_load_that_hung_ends_without_a_word_and_the_next_one_holds_stores_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    turns = StoreTurns()
    with storing(turns, "ab") as writers:
        with turns.loading(), monkeypatch.context() as hurry:
            hurry.setattr(store_turns, "PAUSE_S_MAX", 0.0)
            writers.open("b", 1)
            until(lambda: writers.stored == ["b"])
        with turns.loading():
            writers.open("b")
            writers.open("a")
            writers.join("ab")
            assert writers.stored == ["b", *["a"] * BLOCKS, *["b"] * (BLOCKS - 1)]
