"""A seed is a plan, whose time is requests, steps and rounds in the gate, and no clock."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from stress import pace
from stress.__main__ import main
from stress.engine.layer import EngineLayer
from stress.failure import Failure
from stress.filesystem.layer import FilesystemLayer
from stress.pace import LEAP_S, REQUESTS_A_SECOND, ByCounts
from stress.plan import (
    ROUND_S,
    ROUND_SPELL_S_MAX,
    Fault,
    Kind,
    draw_gate_plan,
    draw_plan,
    draw_round,
)
from stress.remote.layer import RemoteLayer
from stress.runtime.layer import RuntimeLayer

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
    found = ByCounts(draw_gate_plan(1, [RARE, HANGS]), shown.missing)
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
    found = ByCounts(draw_gate_plan(1, [RARE]), shown.missing)
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


def test_deadlines_run_out_while_something_hangs_and_only_then() -> None:
    own = draw_round(1, 0, [HANGS])
    found = ByCounts(draw_gate_plan(1, [HANGS, RARE]), Shown().missing)
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
    found = ByCounts(draw_gate_plan(1, [RARE]), Shown({"3 of 100 blocks of fs": []}).missing)
    with pytest.raises(Failure, match="3 of 100 blocks of fs"):
        play(found)


def test_a_seed_gives_the_same_plan_and_a_longer_run_begins_as_a_shorter_one() -> None:
    """So that a fault found after 50 minutes is not lost when the run is repeated for 60."""
    kinds = RuntimeLayer.kinds
    plan, again = draw_plan(8841, 60, kinds), draw_plan(8841, 600, kinds)
    assert plan.faults == tuple(fault for fault in again.faults if fault.at_s < 60)
    assert plan.faults != draw_plan(8842, 60, kinds).faults
    for fault, same in zip(plan.faults, again.faults, strict=False):
        assert fault.dice.random() == same.dice.random()


def test_leaving_kinds_out_changes_nothing_about_the_others() -> None:
    kinds = RuntimeLayer.kinds
    some = [kind for kind in kinds if kind.name != "lie"]
    rest = tuple(fault for fault in draw_plan(1, 60, kinds).faults if fault.kind != "lie")
    assert draw_plan(1, 60, some).faults == rest


def test_faults_come_as_often_as_their_kind_says() -> None:
    kind = Kind("x", ("a", "b"), per_minute=30, spell_s=(1, 2))
    faults = draw_plan(1, 6000, [kind]).faults
    assert len(faults) == pytest.approx(3000, rel=0.1)
    assert {fault.target for fault in faults} == {"a", "b"}
    assert all(1 <= fault.for_s <= 2 for fault in faults)


def test_an_unknown_kind_of_fault_is_named_with_those_that_there_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A run without the faults that were asked for would show nothing."""
    assert main(["--faults", "kill,flood"]) == 2
    error = capsys.readouterr().err
    assert "--faults flood: this layer has no such faults" in error
    assert "kill" in error.partition("it has")[2]
