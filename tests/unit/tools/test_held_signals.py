"""Signals that are deferred strike later, once, and where they were meant to."""

from __future__ import annotations

import signal
import threading

import pytest

from kvtier.tools.held_signals import HeldSignals


def test_a_signal_waits_for_the_next_check() -> None:
    steps = []

    def work() -> None:
        with HeldSignals() as signals:
            signals.check()
            signal.raise_signal(signal.SIGINT)
            steps.append("went on")
            signals.check()
            steps.append("was not interrupted")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert steps == ["went on"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_signal_that_nobody_asks_for_strikes_at_the_end() -> None:
    steps = []

    def work() -> None:
        with HeldSignals():
            signal.raise_signal(signal.SIGINT)
            steps.append("went on")
        steps.append("was not interrupted")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert steps == ["went on"]


def test_once_let_through_nothing_is_deferred() -> None:
    with HeldSignals() as signals:
        signals.let_through()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_an_outer_block_holds_what_an_inner_one_lets_through() -> None:
    steps = []

    def work() -> None:
        with HeldSignals() as outer:
            with HeldSignals():
                signal.raise_signal(signal.SIGINT)
            steps.append("went on")
            outer.check()
            steps.append("was not interrupted")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert steps == ["went on"]


def test_each_handler_is_as_before() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with HeldSignals():
        assert signal.getsignal(signal.SIGTERM) != before[1]
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_any_thread_may_use_it() -> None:
    ended = []

    def call() -> None:
        with HeldSignals() as signals:
            signals.check()
        ended.append(True)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert ended == [True]
