"""How tiers are closed: together, and none at another's cost."""

from __future__ import annotations

import pytest

from kvtier.core import tier_host
from kvtier.core.tier_host import TierHost, close_tiers


class Host(TierHost):
    """A host that ends when it is asked to, when it is given up, or never."""

    def __init__(self, name: str, ends: str, told: list[str]) -> None:
        self.name = name
        self._ends = ends
        self._told = told
        self._has_ended = False

    def ask_to_end(self) -> None:
        self._told.append(f"{self.name} asked")
        self._has_ended |= self._ends == "asked"

    def give_up(self) -> None:
        self._told.append(f"{self.name} given up")
        self._has_ended |= self._ends == "given up"

    def wait_until_ended(self, timeout_s: float) -> bool:
        assert timeout_s >= 0.0
        self._told.append(f"{self.name} waited for")
        return self._has_ended


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_host, "ABANDON_S", 0.001)


def test_a_tier_that_hangs_takes_no_time_from_the_next_one() -> None:
    """The next one was killed, and not waited for at all: that made it one that hangs, too."""
    told: list[str] = []
    hosts = [Host("a", "never", told), Host("b", "given up", told), Host("c", "asked", told)]
    assert close_tiers(hosts, 0.002) == [False, True, True]
    asked, waited = [f"{x} asked" for x in "abc"], [f"{x} waited for" for x in "abc"]
    given_up = ["a given up", "b given up"]
    assert told == [*asked, *waited, *given_up, "a waited for", "b waited for"]


def test_a_tier_that_ends_when_it_is_asked_is_not_given_up() -> None:
    told: list[str] = []
    assert Host("a", "asked", told).close(0.0) is True
    assert told == ["a asked", "a waited for"]
