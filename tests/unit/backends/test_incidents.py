"""The log of a tier's incidents: what begins and what ends is said once."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

from structlog.testing import capture_logs

from kvtier_backends.incidents import IncidentLog, TierCounters

if TYPE_CHECKING:
    import pytest


def incident_log(counters: TierCounters | None = None) -> IncidentLog:
    return IncidentLog("fs", "1:fs", "/kv", counters or TierCounters())


def test_a_full_filesystem_is_one_line_with_the_remedy_whatever_finds_it_full() -> None:
    counters = TierCounters()
    incidents = incident_log(counters)
    with capture_logs() as lines:
        for name, number in (
            ("stores_full", errno.ENOSPC),
            ("space_failed", errno.ENOSPC),
            ("no_room_for_a_block", errno.EDQUOT),
        ):
            incidents.report("store", name, OSError(number, os.strerror(number)))
        incidents.report("store", "stores_failed", OSError(errno.EIO, "broken"))
    full, broken = lines
    assert (full["kind"], full["log_level"]) == ("stores_full", "warning")
    assert "free space" in full["remedy"]
    assert "remedy" not in broken
    names = ("stores_full", "space_failed", "no_room_for_a_block", "stores_failed")
    assert counters.counts() == dict.fromkeys(names, 1)


def test_the_end_of_a_fault_says_how_much_it_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    incidents = incident_log()
    with capture_logs() as lines:
        for _ in range(2):
            incidents.report("load", "loads_failed", "no answer", path="/kv/a", count=3)
        incidents.success("load")
        assert len(lines) == 1, "one that works half of the time is not over so soon"
        monkeypatch.setattr("kvtier_backends.incidents.EPISODE_S_MIN", 0.0)
        incidents.success("store")
        assert len(lines) == 1
        incidents.success("load")
        incidents.success("load")
    begin, end = lines
    assert (end["event"], end["log_level"]) == ("fs tier: fault is over", "info")
    assert (end["tier"], end["kind"], end["count"]) == ("1:fs", begin["kind"], 6)
    assert end["seconds"] >= 0


def test_a_filesystem_that_is_full_still_has_no_end_though_there_was_room_for_something(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Other faults end. What had no room counts once, by its blocks."""
    monkeypatch.setattr("kvtier_backends.incidents.EPISODE_S_MIN", 0.0)
    incidents = incident_log()
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with capture_logs() as lines:
        incidents.report("store", "no_room_for_a_region", full, blocks=0)
        incidents.report("store", "stores_full", full, count=5)
        incidents.report("store", "stores_failed", OSError(errno.EIO, "broken"))
        incidents.success("store", is_full=True)
        assert [line["kind"] for line in lines] == [
            "no_room_for_a_region",
            "stores_failed",
            "stores_failed",
        ]
        incidents.success("store")
    assert (lines[-1]["kind"], lines[-1]["count"]) == ("no_room_for_a_region", 5)


def test_a_fault_that_comes_and_goes_within_a_minute_is_one_pair_of_lines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    incidents = incident_log()
    with capture_logs() as lines:
        for _ in range(3):
            incidents.report("store", "folder_lost", "it is gone")
            incidents.end("store", "folder_lost")
        assert [line["log_level"] for line in lines] == ["warning", "info"]
        monkeypatch.setattr("kvtier_backends.incidents.EPISODE_S_MIN", 0.0)
        incidents.report("store", "folder_lost", "it is gone")
    assert [line["log_level"] for line in lines] == ["warning", "info", "warning"]
