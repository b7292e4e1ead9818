"""What crosses between an engine and its tiers has its times by the clock of whoever reads them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import get_args

import pytest
from msgspec.structs import fields

from kvtier.core import wire
from kvtier.hosts import machine_time
from kvtier.hosts.channel import ToEngine, ToTier
from kvtier.hosts.machine_time import from_machine_time, to_machine_time
from kvtier.plugin_api.deadlines import NEVER
from tests.support.mailboxes import KeptMessages

ENGINE_S, MACHINE_S = 7.0, 5000.0
CONVERTED = {("Probe", "deadline"), ("LoadJob", "deadline"), ("StoreJob", "deadline")} | {
    ("JobEnded", "at")
}
NOT_CONVERTED = {("Tick", "now"), ("JobEnded", "seconds")}
"""A policy of eviction has the engine's time; the other one is a duration."""


def engine_clock() -> float:
    return ENGINE_S


def machine_clock() -> float:
    return MACHINE_S


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_time, "time", SimpleNamespace(monotonic=machine_clock))


def test_a_deadline_is_as_far_away_for_the_tier_as_for_the_engine() -> None:
    kept = KeptMessages()
    to_tier = to_machine_time(kept, engine_clock)
    for deadline in (ENGINE_S + 3, NEVER):
        to_tier.post(wire.Probe(1, (b"k",), deadline=deadline))
        to_tier.post(wire.LoadJob(2, (b"k",), (0,), deadline=deadline))
        to_tier.post(wire.StoreJob(3, "r", (b"k",), (0,), deadline=deadline))
    to_tier.post(wire.Tick(ENGINE_S))
    *sent, tick = kept.messages
    assert [each.deadline for each in sent] == [MACHINE_S + 3] * 3 + [NEVER] * 3
    assert tick == wire.Tick(ENGINE_S)


@pytest.mark.parametrize(("at", "seen"), [(MACHINE_S - 2, ENGINE_S - 2), (0.0, 0.0)])
def test_a_job_has_ended_as_long_ago_for_the_engine_as_for_the_tier(at: float, seen: float) -> None:
    """0.0 is no time: the tier does not know."""
    kept = KeptMessages()
    from_machine_time(kept, engine_clock).post(wire.JobEnded(1, (), 0.5, at))
    assert kept.messages == [wire.JobEnded(1, (), 0.5, seen)]


def test_an_engine_on_the_clock_of_its_machine_pays_nothing() -> None:
    kept = KeptMessages()
    assert to_machine_time(kept, machine_clock) is kept
    assert from_machine_time(kept, machine_clock) is kept


def test_each_time_that_crosses_is_known_here() -> None:
    """A new one that is not converted would be a time of another clock in a replay."""
    crossing = {
        (each.__name__, field.name)
        for each in get_args(ToTier) + get_args(ToEngine)
        for field in fields(each)
        if field.type in ("float", float)
    }
    assert crossing == CONVERTED | NOT_CONVERTED
