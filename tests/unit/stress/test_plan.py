"""A seed is a plan: the same one each time, whatever else is asked for."""

from __future__ import annotations

import pytest

from stress.__main__ import main
from stress.arguments import GATE_SEED, read_arguments
from stress.plan import Kind, draw_plan
from stress.runtime.layer import RuntimeLayer

KINDS = RuntimeLayer.kinds


def test_a_seed_gives_the_same_plan_each_time() -> None:
    plan = draw_plan(8841, 60, KINDS)
    assert plan == draw_plan(8841, 60, KINDS)
    assert plan.faults != draw_plan(8842, 60, KINDS).faults
    assert [fault.dice.random() for fault in plan.faults] == [
        fault.dice.random() for fault in draw_plan(8841, 60, KINDS).faults
    ]


def test_a_longer_run_begins_as_a_shorter_one() -> None:
    """So that a fault found after 50 minutes is not lost when the run is repeated for 60."""
    short, long = draw_plan(1, 60, KINDS).faults, draw_plan(1, 600, KINDS).faults
    assert short == tuple(fault for fault in long if fault.at_s < 60)


def test_leaving_kinds_out_changes_nothing_about_the_others() -> None:
    some = [kind for kind in KINDS if kind.name != "lie"]
    rest = tuple(fault for fault in draw_plan(1, 60, KINDS).faults if fault.kind != "lie")
    assert draw_plan(1, 60, some).faults == rest


def test_faults_come_as_often_as_their_kind_says() -> None:
    (kind,) = [Kind("x", ("a", "b"), per_minute=30, spell_s=(1, 2))]
    faults = draw_plan(1, 6000, [kind]).faults
    assert len(faults) == pytest.approx(3000, rel=0.1)
    assert {fault.target for fault in faults} == {"a", "b"}
    assert all(1 <= fault.for_s <= 2 for fault in faults)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--minutes", "0"], "--minutes: 0: must be above 0"),
        (["--minutes", "soon"], "--minutes"),
        (["--minutes", "nan"], "--minutes: nan: must be above 0"),
        (["--seed", "-1"], "--seed: -1: must not be negative"),
        (["--layer", "moon"], "invalid choice: 'moon'"),
        (["--clients", "0"], "--clients: 0: must be from 1"),
        (["--gate", "--minutes", "1"], "--gate and --minutes"),
    ],
)
def test_a_wrong_argument_is_named(
    given: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        read_arguments(given)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_the_gate_has_a_seed_of_its_own_and_others_draw_theirs() -> None:
    assert read_arguments(["--gate"]).seed == read_arguments(["--gate"]).seed == GATE_SEED
    assert read_arguments(["--gate", "--seed", "7"]).seed == 7
    assert len({read_arguments([]).seed for _ in range(20)}) > 1


def test_a_folder_with_something_in_it_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read_arguments(["--folder", str(__file__).rpartition("/")[0]])
    assert "it is not empty" in capsys.readouterr().err


def test_an_unknown_kind_of_fault_is_named_with_those_that_there_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--faults", "kill,flood"]) == 2
    error = capsys.readouterr().err
    assert "--faults flood: this layer has no such faults" in error
    assert "harm_files, kill" not in error.partition("it has")[0]
    assert "kill" in error.partition("it has")[2]
