"""Every installed eviction policy passes the shipped suite, and the suite can tell a bad one."""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvtier.policies.eviction.lru import LRUPolicy
from kvtier.settings.plugins import POLICIES
from kvtier.testing import POLICY_CHECKS, NotConforming, PolicyCheck, check_policy
from kvtier.testing import policy_conformance as suite

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from kvtier.plugin_api.keys import Key, RequestId

PAGE = Path(__file__).resolve().parents[2] / "docs/how-to/write-a-policy.md"
INSTALLED = {entry.name: entry for entry in entry_points(group=POLICIES)}


@pytest.mark.parametrize("check", POLICY_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", sorted(INSTALLED))
def test_an_installed_policy_keeps_the_contract(name: str, check: PolicyCheck) -> None:
    check(INSTALLED[name].load())


def test_our_own_policies_are_installed() -> None:
    assert {"arc", "lru", "reuse"} <= INSTALLED.keys()


def test_check_policy_runs_all_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[object] = []
    monkeypatch.setattr(suite, "POLICY_CHECKS", [ran.append, ran.append])
    check_policy(LRUPolicy)
    assert ran == [LRUPolicy, LRUPolicy]


class IgnoresHolds(LRUPolicy):
    def hold(self, keys: Sequence[Key]) -> None:
        pass


class NeverLetsGo(LRUPolicy):
    def unhold(self, keys: Sequence[Key]) -> None:
        pass


class CountsHolds(LRUPolicy):
    """Held twice, it wants to be released twice."""

    def hold(self, keys: Sequence[Key]) -> None:
        self._twice = set(keys) & self._held.keys()
        super().hold(keys)

    def unhold(self, keys: Sequence[Key]) -> None:
        twice: set[Key] = getattr(self, "_twice", set())
        self._twice = twice - set(keys)
        super().unhold([key for key in keys if key not in twice])


class IgnoresExclude(LRUPolicy):
    def choose_victims(self, count: int, exclude: Collection[Key]) -> list[Key]:
        return super().choose_victims(count, ())


class ExcludesForEver(LRUPolicy):
    def choose_victims(self, count: int, exclude: Collection[Key]) -> list[Key]:
        self.hold([key for key in exclude if key in self])
        return super().choose_victims(count, exclude)


class NamesOneTwice(LRUPolicy):
    def choose_victims(self, count: int, exclude: Collection[Key]) -> list[Key]:
        victims = super().choose_victims(count, exclude)
        return victims[:-1] + victims[:1] if len(victims) > 1 else victims


class KeepsWhatItChose(LRUPolicy):
    def choose_victims(self, count: int, exclude: Collection[Key]) -> list[Key]:
        victims = super().choose_victims(count, exclude)
        self.restore(victims)
        return victims


class GivesOneAtATime(LRUPolicy):
    def choose_victims(self, count: int, exclude: Collection[Key]) -> list[Key]:
        return super().choose_victims(min(count, 1), exclude)


class GivesOneTooMany(LRUPolicy):
    def choose_victims(self, count: int, exclude: Collection[Key]) -> list[Key]:
        return super().choose_victims(count + 1, exclude)


class AdmitsWhatItTouches(LRUPolicy):
    def touch(self, keys: Sequence[Key], request: RequestId) -> None:
        self.admit(keys, request, held=False)


class AdmitsTheOrder(LRUPolicy):
    def end_request(self, request: RequestId, order: Sequence[Key] | None) -> None:
        self.admit(order or (), request, held=False)
        super().end_request(request, order)


class RestoresNothing(LRUPolicy):
    def restore(self, keys: Sequence[Key]) -> None:
        pass


class RestoresAsNew(LRUPolicy):
    def restore(self, keys: Sequence[Key]) -> None:
        self.admit([key for key in keys if key not in self], "restored", held=False)


class RestoresTwice(LRUPolicy):
    def restore(self, keys: Sequence[Key]) -> None:
        self._extra = getattr(self, "_extra", 0) + sum(key in self for key in keys)
        super().restore(keys)

    def __len__(self) -> int:
        return super().__len__() + getattr(self, "_extra", 0)


class HoldsWhatIsGone(LRUPolicy):
    def forget(self, keys: Sequence[Key]) -> None:
        self._runs.drop(keys)


class ForgetsNothing(LRUPolicy):
    def forget(self, keys: Sequence[Key]) -> None:
        pass


class KeepsWhatARunningRequestHas(LRUPolicy):
    def forget(self, keys: Sequence[Key]) -> None:
        run_of = self._runs.run_of
        super().forget([key for key in keys if key in run_of and run_of[key].request is None])


class HoldsOnAfterClear(LRUPolicy):
    def clear(self) -> None:
        self._runs.clear()


class ClearsNothing(LRUPolicy):
    def clear(self) -> None:
        pass


class TripsOverUnknownKeys(LRUPolicy):
    def forget(self, keys: Sequence[Key]) -> None:
        for key in keys:
            assert key in self
        super().forget(keys)


class HoldsOnlyWhatIsResident(LRUPolicy):
    def hold(self, keys: Sequence[Key]) -> None:
        super().hold([key for key in keys if key in self])


class CountsCalls(LRUPolicy):
    def admit(self, keys: Sequence[Key], request: RequestId, *, held: bool) -> None:
        super().admit(keys, request, held=held)
        self._admitted = getattr(self, "_admitted", 0) + len(keys)

    def __len__(self) -> int:
        return min(getattr(self, "_admitted", 0), self.capacity)


class TripsOverForeignKeys(LRUPolicy):
    def end_request(self, request: RequestId, order: Sequence[Key] | None) -> None:
        assert all(key in self for key in order or ())
        super().end_request(request, order)


class DropsItsBlocksAtTheEnd(LRUPolicy):
    def end_request(self, request: RequestId, order: Sequence[Key] | None) -> None:
        run = self._runs.open(request)
        super().end_request(request, order)
        if run is not None:
            self.forget(list(run.keys))


class RemembersRequests(LRUPolicy):
    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._known: dict[RequestId, int] = {}

    def touch(self, keys: Sequence[Key], request: RequestId) -> None:
        self._known[request] = len(keys)
        super().touch(keys, request)


class RemembersVictims(LRUPolicy):
    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._ghosts: list[Key] = []

    def choose_victims(self, count: int, exclude: Collection[Key]) -> list[Key]:
        victims = super().choose_victims(count, exclude)
        self._ghosts += victims
        return victims


class RemembersTooMany(RemembersVictims):
    """Bounded, but at far more than the capacity."""

    def choose_victims(self, count: int, exclude: Collection[Key]) -> list[Key]:
        victims = super().choose_victims(count, exclude)
        del self._ghosts[: -20 * self.capacity]
        return victims


class LosesATouchedHead(LRUPolicy):
    """Only after just these calls: what Hypothesis is for."""

    def touch(self, keys: Sequence[Key], request: RequestId) -> None:
        super().touch(keys, request)
        if len(keys) > 1 and keys[0] in self._held and keys[1] not in self._held:
            self._runs.drop(keys[:1])


FLAWED: dict[type[LRUPolicy], PolicyCheck] = {
    IgnoresHolds: suite.held_keys_are_never_chosen,
    NeverLetsGo: suite.held_keys_are_never_chosen,
    CountsHolds: suite.held_keys_are_never_chosen,
    IgnoresExclude: suite.excluded_keys_are_never_chosen,
    ExcludesForEver: suite.excluded_keys_are_never_chosen,
    NamesOneTwice: suite.no_key_is_chosen_twice,
    KeepsWhatItChose: suite.no_key_is_chosen_twice,
    GivesOneAtATime: suite.as_many_victims_as_asked_for_if_there_are,
    GivesOneTooMany: suite.as_many_victims_as_asked_for_if_there_are,
    AdmitsWhatItTouches: suite.what_was_chosen_is_forgotten,
    RestoresNothing: suite.what_is_restored_goes_next,
    RestoresAsNew: suite.what_is_restored_goes_next,
    RestoresTwice: suite.what_is_restored_goes_next,
    HoldsWhatIsGone: suite.what_is_forgotten_is_gone,
    ForgetsNothing: suite.what_is_forgotten_is_gone,
    KeepsWhatARunningRequestHas: suite.another_may_go_instead,
    HoldsOnAfterClear: suite.clear_forgets_everything,
    ClearsNothing: suite.clear_forgets_everything,
    TripsOverUnknownKeys: suite.unknown_keys_are_ignored,
    HoldsOnlyWhatIsResident: suite.keys_may_be_held_before_they_are_resident,
    CountsCalls: suite.length_is_how_many_are_resident,
    AdmitsTheOrder: suite.requests_may_end_in_any_way,
    TripsOverForeignKeys: suite.requests_may_end_in_any_way,
    DropsItsBlocksAtTheEnd: suite.requests_may_end_in_any_way,
    RemembersRequests: suite.an_ended_request_leaves_nothing_behind,
    RemembersVictims: suite.memory_is_bounded_by_the_capacity,
    RemembersTooMany: suite.memory_is_bounded_by_the_capacity,
    LosesATouchedHead: suite.books_are_kept_through_any_calls,
}


@pytest.mark.parametrize(("flawed", "check"), FLAWED.items(), ids=lambda value: value.__name__)
def test_a_flawed_policy_fails_the_check_meant_for_it(
    flawed: type[LRUPolicy], check: PolicyCheck
) -> None:
    """Each flaw is one that a real policy might have; a suite that passes it is no use."""
    trips = flawed in {TripsOverUnknownKeys, TripsOverForeignKeys}
    with pytest.raises(AssertionError if trips else NotConforming):
        check(flawed)


def test_every_check_has_a_flaw_that_it_finds() -> None:
    assert set(FLAWED.values()) == set(POLICY_CHECKS)
