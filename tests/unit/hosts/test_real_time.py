"""Deadlines cross from an engine on a clock of its own to a tier in real time, and ends back."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvtier.core import messages as m
from kvtier.hosts import real_time
from kvtier.hosts.real_time import FromRealTime, ToRealTime
from kvtier.plugin_api.backend import Outcome
from kvtier.plugin_api.deadlines import NEVER

REAL_S, ENGINES_S = 5000.0, 70.0


class Posted(list[Any]):
    def post(self, message: Any) -> bool:
        self.append(message)
        return True


@pytest.fixture(autouse=True)
def _real_time(monkeypatch: pytest.MonkeyPatch) -> None:
    class Time:
        monotonic = staticmethod(lambda: REAL_S)

    monkeypatch.setattr(real_time, "time", Time)


@pytest.mark.parametrize(
    "message",
    [
        m.Probe(1, (b"key",), deadline=ENGINES_S + 2),
        m.LoadJob(1, (b"key",), (0,), deadline=ENGINES_S + 2),
        m.StoreJob(1, "request", (b"key",), (0,), deadline=ENGINES_S + 2),
    ],
)
def test_what_is_left_until_a_deadline_stays_the_same(message: Any) -> None:
    tier = Posted()
    assert ToRealTime(tier, lambda: ENGINES_S).post(message)
    (sent,) = tier
    assert sent.deadline == REAL_S + 2
    assert msgspec.structs.replace(sent, deadline=message.deadline) == message


def test_what_has_no_time_in_it_passes_as_it_is() -> None:
    tier, link = Posted(), Posted()
    endless = m.Probe(1, (b"key",), deadline=NEVER)
    ToRealTime(tier, lambda: ENGINES_S).post(endless)
    ToRealTime(tier, lambda: ENGINES_S).post(m.Tick(now=1.0))
    unknown = m.JobEnded(1, (Outcome.DONE,), 0.5)
    FromRealTime(link, lambda: ENGINES_S).post(unknown)
    assert (tier, link) == ([endless, m.Tick(now=1.0)], [unknown])


def test_a_job_ends_in_the_engines_time() -> None:
    link = Posted()
    FromRealTime(link, lambda: ENGINES_S).post(m.JobEnded(1, (Outcome.DONE,), 0.5, REAL_S - 3))
    assert [each.at for each in link] == [ENGINES_S - 3]
