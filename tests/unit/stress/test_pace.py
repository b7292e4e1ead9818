"""The time of a plan in the gate: requests, steps, rounds, and no clock."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING

import pytest

from stress import pace
from stress.engine.layer import EngineLayer
from stress.engine.pace import REQUESTS_A_SECOND as SERVED_A_SECOND
from stress.engine.pace import ByRequests
from stress.failure import Failure
from stress.filesystem.layer import FilesystemLayer
from stress.pace import IDLE_STEPS_A_SECOND, LEAP_S, REQUESTS_A_SECOND, ByClock, ByCounts
from stress.plan import (
    ROUND_S,
    ROUND_SPELL_S_MAX,
    Fault,
    Kind,
    Plan,
    draw_gate_plan,
    draw_plan,
    draw_round,
)
from stress.ports import HeldPort
from stress.remote.layer import RemoteLayer
from stress.runtime.layer import RuntimeLayer
from tests.support.patience import until_true

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from stress.layer import Layer

RARE = Kind("rare", ("a", "b"), per_minute=0.1)
HANGS = Kind("hang", ("a",), per_minute=0.1, spell_s=(2.0, 2.0))
STEPS_MAX = 100_000


class Shown:
    """What a run has shown: what the test says."""

    def __init__(self, missing: Mapping[str, Collection[str]] | None = None) -> None:
        self.found = dict(missing or {})
        self.asked = 0

    def missing(self) -> Mapping[str, Collection[str]]:
        """Return it."""
        self.asked += 1
        return self.found


def play(found: ByCounts, decided: int = 1) -> list[Fault]:
    """Let steps pass until the plan is over; returns what has begun."""
    begun: list[Fault] = []
    for _ in range(STEPS_MAX):
        if found.is_over():
            return begun
        begun += found.due()
        found.step(decided)
    raise AssertionError("it never ends")


@pytest.mark.parametrize("layer", [RuntimeLayer, FilesystemLayer, RemoteLayer, EngineLayer])
@pytest.mark.parametrize("seed", [1, 20])
def test_the_first_round_has_each_kind_and_is_the_same_each_time(
    layer: type[Layer], seed: int
) -> None:
    plan = draw_gate_plan(seed, layer.kinds)
    assert plan == draw_gate_plan(seed, layer.kinds)
    assert {fault.kind for fault in plan.faults} == {kind.name for kind in layer.kinds}
    assert all(fault.at_s <= ROUND_S for fault in plan.faults)
    assert all(fault.for_s <= ROUND_SPELL_S_MAX for fault in plan.faults)


def test_what_a_round_has_not_shown_comes_again_and_nothing_else() -> None:
    shown = Shown({"a fault rare that hit something": ["rare"]})
    found = ByCounts(draw_gate_plan(1, [RARE, HANGS]), shown)
    begun: list[Fault] = []
    while shown.asked < 3:
        begun += found.due()
        found.step(1)
        assert not found.is_over()
    assert [fault.kind for fault in begun].count("hang") == 1
    assert [fault.kind for fault in begun].count("rare") >= 3
    shown.found.clear()
    play(found)


def test_a_round_without_faults_lets_tiers_serve_until_enough_was_read() -> None:
    shown = Shown({"3 of 100 blocks of fs": []})
    found = ByCounts(draw_gate_plan(1, [RARE]), shown)
    while shown.asked < 2:
        found.due()
        found.step(1)
        found.is_over()
    for _ in range(int(0.4 * REQUESTS_A_SECOND)):
        assert not found.due()
        found.step(1)
        assert not found.is_over()
    assert shown.asked == 2
    shown.found.clear()
    assert play(found) == []


def test_time_passes_by_requests_and_where_all_wait_by_steps() -> None:
    found = ByCounts(draw_gate_plan(1, [RARE]), Shown())
    for _ in range(int(REQUESTS_A_SECOND)):
        found.step(1)
    assert found.now_s() == pytest.approx(1.0)
    for _ in range(int(IDLE_STEPS_A_SECOND)):
        found.step(0)
    assert found.now_s() == pytest.approx(2.0)


def test_deadlines_run_out_while_something_hangs_and_only_then() -> None:
    own = draw_round(1, 0, [HANGS])
    found = ByCounts(draw_gate_plan(1, [HANGS, RARE]), Shown())
    leapt: list[tuple[float, float]] = []
    while not found.is_over():
        found.due()
        found.step(1)
        if not leapt or leapt[-1][1] != found.leapt_s:
            leapt.append((found.now_s(), found.leapt_s))
    (_, before), (first_s, first), (second_s, second) = leapt
    assert (before, first, second) == (0.0, LEAP_S, 2 * LEAP_S)
    assert own[0].at_s < first_s < second_s < own[0].at_s + own[0].for_s


def test_what_is_never_shown_ends_the_run_with_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "GATE_S_MAX", 0.0)
    found = ByCounts(draw_gate_plan(1, [RARE]), Shown({"3 of 100 blocks of fs": []}))
    with pytest.raises(Failure, match="3 of 100 blocks of fs"):
        play(found)


def test_by_the_clock_the_scheduler_has_no_other_time() -> None:
    found = ByClock(draw_plan(1, 60, [HANGS]))
    for _ in range(100):
        found.due()
        found.step(1)
    assert found.leapt_s == 0.0
    assert ByClock(Plan(1, 0.0, ())).is_over()


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_beside_a_server_time_passes_by_requests() -> None:
    requests = [0]
    found = ByRequests(lambda: requests[0])
    passing = asyncio.create_task(found.run())
    await until_true(lambda: found.now_s() > 0.0)  # clients wait for ever, and it goes on
    before_s = found.now_s()
    requests[0] += int(100 * SERVED_A_SECOND)
    await found.until(before_s + 100)
    passing.cancel()
    assert found.now_s() >= before_s + 100


def test_a_port_is_a_servers_however_often_it_starts_and_nobody_elses() -> None:
    held = HeldPort()
    try:
        for _ in range(2):
            with socket.create_server(("127.0.0.1", held.number)):
                pass
            with socket.socket() as client, pytest.raises(ConnectionRefusedError):
                client.connect(("127.0.0.1", held.number))
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", held.number))
    finally:
        held.release()
