"""For how long a process was ready to run and was not, from what the kernel counts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvtier.plugin_api import run_delays
from kvtier.plugin_api.run_delays import RunDelays, ThreadRuns


class Machine:
    """A clock, and one thread of a process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        self.runs: dict[str, ThreadRuns] = {"1": ThreadRuns((5, 5), 7.0, is_ready=False)}
        self.looks = 0
        clock = SimpleNamespace(monotonic=lambda: self.now_s)
        monkeypatch.setattr(run_delays, "time", clock)
        monkeypatch.setattr(run_delays, "runs_of_threads", self._look)
        self.delays = RunDelays(1, every_s=0.25)
        self.delays.look()

    def _look(self, _threads: str) -> dict[str, ThreadRuns]:
        self.looks += 1
        return self.runs

    def look_after(self, seconds: float, runs: ThreadRuns | None = None) -> float:
        """Let time pass, after which the kernel says this of the thread."""
        self.now_s += seconds
        if runs is not None:
            self.runs = {"1": runs}
        return self.delays.look()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def test_a_thread_that_waits_for_something_else_is_not_kept_from_running(machine: Machine) -> None:
    """As one that hangs in a call, or was stopped."""
    assert machine.look_after(3.0) == pytest.approx(0.0)


def test_a_thread_that_was_run_waited_for_what_the_kernel_counts(machine: Machine) -> None:
    assert machine.look_after(3.0, ThreadRuns((6, 6), 7.5, is_ready=False)) == pytest.approx(0.5)


def test_a_wait_that_lasts_is_told_before_it_is_over_and_once(machine: Machine) -> None:
    waits = ThreadRuns((5, 5), 7.0, is_ready=True)
    assert machine.look_after(1.0, waits) == pytest.approx(1.0)
    assert machine.look_after(2.0, waits) == pytest.approx(2.0)
    assert machine.look_after(0.5, ThreadRuns((6, 6), 10.25, is_ready=True)) == pytest.approx(0.25)


def test_a_thread_that_runs_is_ready_and_does_not_wait(machine: Machine) -> None:
    assert machine.look_after(1.0, ThreadRuns((900, 5), 7.0, is_ready=True)) == pytest.approx(0.0)


def test_what_a_thread_waited_before_it_was_seen_says_nothing(machine: Machine) -> None:
    machine.runs["2"] = ThreadRuns((1, 1), 50.0, is_ready=False)
    assert machine.look_after(1.0) == pytest.approx(0.0)


def test_a_process_that_is_gone_waits_for_nothing(machine: Machine) -> None:
    machine.runs = {}
    assert machine.look_after(1.0) == pytest.approx(0.0)


def test_the_kernel_is_asked_seldom(machine: Machine) -> None:
    machine.look_after(0.1)
    machine.look_after(0.1)
    assert machine.looks == 1
    machine.look_after(0.1)
    assert machine.looks == 2


def test_a_process_that_never_was_has_no_threads() -> None:
    assert run_delays.runs_of_threads("/proc/0/task") == {}
