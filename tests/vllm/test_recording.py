"""What a recorder makes of a tier that fails: when the fault began, and when it ended."""

from __future__ import annotations

from unittest.mock import patch

from kvtier.engine.link.tier_health import TierRecord
from kvtier.vllm.recording import WatchedWork


def looked_at(*seen: tuple[float, int, int, bool]) -> list[tuple[float, str]]:
    """Return what is found, given the time, successes, failures, and whether it is bypassed."""
    with patch("time.time", return_value=100.0):
        watched = WatchedWork()
    found = (watched.look(TierRecord(*record), now) for now, *record in seen)
    return [each for each in found if each is not None]


def test_a_fault_lasts_from_the_last_success_to_the_last_failure() -> None:
    """The request that showed it had come before it failed, so it must not find the tier."""
    assert looked_at(
        (101, 1, 0, False),
        (102, 2, 0, False),
        (103, 2, 0, False),
        (104, 2, 1, False),
        (105, 2, 3, True),
        (106, 2, 3, True),
        (107, 2, 3, False),  # half open
        (108, 3, 3, False),
        (109, 4, 3, False),
    ) == [(102, "tier_down"), (106, "tier_up")]


def test_a_single_failure_is_a_short_fault() -> None:
    assert looked_at((101, 5, 0, False), (102, 5, 1, False), (103, 6, 1, False)) == [
        (101, "tier_down"),
        (102, "tier_up"),
    ]


def test_a_tier_that_never_works_is_down_from_the_start() -> None:
    assert looked_at((105, 0, 0, True), (106, 0, 0, True)) == [(100, "tier_down")]


def test_a_success_beside_a_failure_does_not_end_a_fault() -> None:
    assert looked_at((101, 1, 1, False), (102, 2, 2, False)) == [(100, "tier_down")]
