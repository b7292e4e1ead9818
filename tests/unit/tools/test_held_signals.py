"""Signals that are deferred strike later, once, and where they were meant to."""

from __future__ import annotations

import signal
import threading
from typing import TYPE_CHECKING

import pytest

from kvtier.tools.held_signals import HeldSignals

if TYPE_CHECKING:
    from collections.abc import Callable


def asked(steps: list[str]) -> None:
    with HeldSignals() as signals:
        signals.check()
        signal.raise_signal(signal.SIGINT)
        steps.append("went on")
        signals.check()
        steps.append("was not interrupted")


def never_asked(steps: list[str]) -> None:
    with HeldSignals():
        signal.raise_signal(signal.SIGINT)
        steps.append("went on")
    steps.append("was not interrupted")


def held_by_an_outer_block(steps: list[str]) -> None:
    with HeldSignals() as outer:
        with HeldSignals():
            signal.raise_signal(signal.SIGINT)
        steps.append("went on")
        outer.check()
        steps.append("was not interrupted")


@pytest.mark.parametrize("work", [asked, never_asked, held_by_an_outer_block])
def test_a_signal_waits_for_the_next_check_or_the_end(work: Callable[[list[str]], None]) -> None:
    steps: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        work(steps)
    assert steps == ["went on"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_once_let_through_nothing_is_deferred() -> None:
    with HeldSignals() as signals:
        signals.let_through()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


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
