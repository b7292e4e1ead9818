"""How soon a tier's next life begins, on a clock of the test's own."""

from __future__ import annotations

import threading

from hypothesis import given, strategies

from kvtier.hosts.restarts import RESTART_PAUSE_S, WELL_S, RestartPause
from kvtier.hosts.thread_host import TierThread
from kvtier.plugin_api.backend import BackendContext, Namespace
from kvtier.plugin_api.slot_memory import SlotMemory
from kvtier.settings.runtime_config import TierConfig
from kvtier_backends.memory import MemoryBackend
from tests.support.mailboxes import KeptMessages


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def a_life(pause: RestartPause, clock: Clock, seconds: float) -> float:
    pause.opened()
    clock.now_s += seconds
    return pause.after_a_life()


def test_the_pause_doubles_while_lives_break_soon_and_service_is_back_in_seconds() -> None:
    """Six kills made it a minute once, and only a life of a minute ended that."""
    clock = Clock()
    pause = RestartPause(clock=clock)
    assert [a_life(pause, clock, 1.0) for _ in range(6)] == [1.0, 2.0, 4.0, 8.0, 10.0, 10.0]
    assert a_life(pause, clock, WELL_S) == RESTART_PAUSE_S


def test_a_life_that_was_well_begins_anew_however_many_broke_before() -> None:
    clock = Clock()
    pause = RestartPause(clock=clock)
    assert {a_life(pause, clock, WELL_S) for _ in range(100)} == {RESTART_PAUSE_S}


def test_a_life_that_never_began_was_not_well_however_long_it_tried() -> None:
    """A backend that takes its time to fail must not be tried again at once for it."""
    clock = Clock()
    pause = RestartPause(clock=clock)
    pauses = []
    for _ in range(4):
        clock.now_s += 600.0
        pauses.append(pause.after_a_life())
    assert pauses == [1.0, 2.0, 4.0, 8.0]


@given(
    strategies.lists(strategies.floats(0.0, 100.0)),
    strategies.floats(0.001, 5.0),
    strategies.floats(0.001, 20.0),
)
def test_no_pause_is_longer_than_the_longest(
    lives: list[float], first_s: float, longest_s: float
) -> None:
    clock = Clock()
    pause = RestartPause(first_s, longest_s, clock)
    for seconds in lives:
        assert 0 < a_life(pause, clock, seconds) <= longest_s


class Impatient(threading.Event):
    """Does not wait, notes how long it was to, and asks the host to end after so many times."""

    def __init__(self, host: TierThread, waits_max: int) -> None:
        super().__init__()
        self.waits_s: list[float] = []
        self._host = host
        self._waits_max = waits_max

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.waits_s.append(timeout)
        if len(self.waits_s) == self._waits_max:
            self._host.ask_to_end()
        return self.is_set()


class NeverOpens(MemoryBackend):
    async def open(self) -> None:
        raise OSError(5, "Input/output error")


def test_a_tier_whose_lives_break_is_begun_anew_within_seconds() -> None:
    """The host takes its pauses from there."""
    context = BackendContext(8, Namespace({}), "1:t")
    memory = SlotMemory.anonymous(8, 8)
    backend = NeverOpens(context, 8)
    tier = TierConfig("t", "1:t")
    host = TierThread(tier, memory, KeptMessages(), messages_max=4, make_backend=lambda: backend)
    host.make()
    host._life.ending = ending = Impatient(host, 8)
    host._run()
    assert ending.waits_s == [1.0, 2.0, 4.0, 8.0, 10.0, 10.0, 10.0, 10.0]
