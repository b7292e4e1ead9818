"""The suite's clock tells a call that blocks from a machine that has no time for this process."""

from __future__ import annotations

import threading
from functools import partial
from types import SimpleNamespace

import pytest

from kvtier.plugin_api import run_delays
from kvtier.plugin_api.run_delays import ThreadRuns, runs_of_threads
from kvtier.testing import NotConforming, _run_clock, _workbench, backend_calls
from kvtier.testing._run_clock import RunClock
from tests.conformance._flawed_conduct import CLOCK, BlocksTheLoop, made


class Machine:
    """A clock, and for how long each thread has waited for a processor."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.delays_s = {"1": 5.0}
        self.waits = False  # all the time
        for module in (_run_clock, run_delays):
            monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: CLOCK.now))
        monkeypatch.setattr(run_delays, "runs_of_threads", self.runs)
        self.clock = RunClock()
        self.last_s = self.clock()

    def runs(self, _threads: str) -> dict[str, ThreadRuns]:
        """Return what the kernel says: each thread runs, now and then."""
        if self.waits:
            self.delays_s = {"1": CLOCK.now}
        return {
            thread: ThreadRuns((int(1e9 * CLOCK.now), 1), delay_s, is_ready=False)
            for thread, delay_s in self.delays_s.items()
        }

    def passes(self, seconds: float, **waited_s: float) -> float:
        """Let time pass, for some of which threads wait. Returns what the clock makes of it."""
        CLOCK.now += seconds
        for thread, waited in waited_s.items():
            number = thread.removeprefix("of_")
            self.delays_s[number] = self.delays_s.get(number, 0.0) + waited
        before_s, self.last_s = self.last_s, self.clock()
        return self.last_s - before_s


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def test_time_in_which_a_thread_waits_for_a_processor_does_not_pass(machine: Machine) -> None:
    assert machine.passes(3.0) == pytest.approx(3.0), "it was run, or waited for something else"
    assert machine.passes(3.0, of_1=2.9) == pytest.approx(0.1)
    assert machine.passes(3.0, of_1=0.5) == pytest.approx(2.5)
    assert machine.passes(3.0, of_1=9.0) == pytest.approx(0.0), "not more than has passed"
    assert machine.passes(3.0) == pytest.approx(3.0)


def test_threads_may_wait_at_the_same_time_and_begin_and_end(machine: Machine) -> None:
    assert machine.passes(3.0, of_2=100.0) == pytest.approx(3.0), "what was before it was seen"
    assert machine.passes(3.0, of_1=1.0, of_2=2.0) == pytest.approx(1.0)
    del machine.delays_s["2"]
    assert machine.passes(3.0) == pytest.approx(3.0)


def test_where_the_kernel_does_not_tell_it_is_an_ordinary_clock(machine: Machine) -> None:
    machine.delays_s = {}
    assert machine.passes(3.0) == pytest.approx(3.0)


def test_the_kernel_is_asked_about_this_thread() -> None:
    assert str(threading.get_native_id()) in runs_of_threads("/proc/self/task")


@pytest.mark.anyio
async def test_a_call_that_blocks_is_found_by_this_clock_and_a_busy_machine_is_no_flaw(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_workbench, "clock", machine.clock)
    with pytest.raises(NotConforming, match="load must not block the event loop"):
        await backend_calls.no_call_blocks_the_event_loop(partial(made, BlocksTheLoop))
    # The same time, but this thread was ready to run.
    machine.waits = True
    machine.clock()
    await backend_calls.no_call_blocks_the_event_loop(partial(made, BlocksTheLoop))
