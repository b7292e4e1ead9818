"""An eviction policy that raises is replaced by ``lru``, and nothing else is lost."""

from __future__ import annotations

import errno
import itertools
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, strategies

from kvtier.core.policy_actor import TICKS_WITHOUT_MEMORY
from kvtier.plugin_api.backend import BackendTraits
from kvtier.plugin_api.eviction_policy import EvictionPolicy
from kvtier.policies.eviction.lru import LRUPolicy
from tests.unit.engine._story import Story

if TYPE_CHECKING:
    from collections.abc import Callable

SLOTS = 6
TIER_BLOCKS = 8
CALLS = sorted(EvictionPolicy.__abstractmethods__ - {"__len__"} | {"pass_time"})


def breaking(method: str, calls: int) -> type[LRUPolicy]:
    """Return a policy that raises from its n-th call of ``method`` on."""
    return failing(method, range(calls, 10**9), RuntimeError("a policy of anybody's"))


def failing(method: str, calls: range, error: Exception) -> type[LRUPolicy]:
    """Return a policy that raises at these of all calls of ``method`` that there are."""
    numbers = itertools.count()

    def call(self: LRUPolicy, *arguments: Any, **options: Any) -> Any:
        if next(numbers) in calls:
            raise error
        return getattr(LRUPolicy, method)(self, *arguments, **options)

    return type("Failing", (LRUPolicy,), {method: call})


class Served(Story):
    """A runtime with one bounded tier; either policy may be one that breaks."""

    def __init__(
        self, primary: Callable[[int], EvictionPolicy], tier: Callable[[int], EvictionPolicy]
    ) -> None:
        traits = BackendTraits(1, 1, TIER_BLOCKS)
        super().__init__(slots=SLOTS, policy=primary, tier_policy=tier, backend_traits=traits)
        self.requests = 0

    def serve(self, first: int, count: int) -> int:
        """Look up, load and store a request's blocks; return how many could be stored."""
        facade, request = self.runtime.facade, f"r{self.requests}"
        self.requests += 1
        keys = [b"%08d" % (first + n) for n in range(count)]
        facade.on_request_started(request)
        hits = facade.lookup_prefix(keys, request) or 0
        facade.prepare_load(keys[:hits], request)
        facade.complete_load(keys[:hits], request)
        grant = facade.prepare_store(keys[hits:], request)
        granted = [] if grant is None else grant.keys
        facade.complete_store(granted, request)
        facade.touch(keys, request)
        facade.on_request_finished(request, keys)
        self.now += 1.5
        self.step()
        return len(granted)

    def replaced(self) -> tuple[float, float]:
        """Return how many policies were replaced: the primary tier's, and the other's."""
        now = self.runtime.facade.statistics()
        return (
            now.primary.counts.policies_replaced,
            now.tiers[0].counts.policies_replaced,
        )

    def assert_policies_know_what_is_there(self) -> None:
        primary, (tier,) = self.runtime.primary, self.runtime.tiers
        policy = self.runtime.engine.policy.policy
        assert isinstance(policy, LRUPolicy)
        assert set(policy._runs.run_of) == set(primary._slot_of)
        assert tier.policy is not None
        own = tier.bounded.policy.actor.policy
        assert set(own._runs.run_of) == tier.bounded._resident
        assert not own._held


@pytest.mark.parametrize("method", CALLS)
@pytest.mark.parametrize("where", ["primary", "tier"])
def test_stores_go_on_after_any_call_of_the_policy_raised(where: str, method: str) -> None:
    """It used to end all stores and promotions for the rest of the engine's life."""
    policy = breaking(method, 2)
    story = Served(policy, LRUPolicy) if where == "primary" else Served(LRUPolicy, policy)
    for number in range(12):
        assert story.serve(5 * (number % 4), 4) or number > 3
        if method in ("forget", "clear"):
            story.runtime.facade.reset()
            story.runtime.tiers[0].answer  # noqa: B018 - nothing to answer
    stored = [story.serve(100 + 4 * number, 4) for number in range(4)]
    assert stored == [4, 4, 4, 4]
    story.assert_policies_know_what_is_there()
    replaced = story.replaced()
    assert replaced in ((1, 0), (0, 0)) if where == "primary" else replaced in ((0, 1), (0, 0))
    notices = [each for each in story.runtime.cell.notices if "policy broke" in each.event]
    assert len(notices) == sum(replaced)
    if method not in ("forget", "clear", "restore"):
        assert sum(replaced) == 1, "it was never called"
        assert "a policy of anybody's" in notices[0].detail


RUBBISH = [b"not there", b"neither", b"nor this", b"nor that"]


@pytest.mark.parametrize("victims", [5, [None], ["text"], "new", "the same", "those in use"])
def test_a_policy_whose_victims_can_never_go_is_replaced(victims: Any) -> None:
    """It was asked again and again, for ever: the engine stood still. So is one that names none."""
    numbers = itertools.count()

    class Endless(LRUPolicy):
        def choose_victims(self, wanted: int, exclude: Any) -> Any:
            if victims == "new":
                return [b"%d" % next(numbers) for _ in range(wanted)]
            if victims == "the same":
                return RUBBISH[:wanted]
            return [*self._held, *RUBBISH][:wanted] if victims == "those in use" else victims

    story = Served(Endless, LRUPolicy)
    assert [story.serve(10 * number, 4) for number in range(6)] == [4] * 6
    assert story.replaced() == (1, 0)
    story.assert_policies_know_what_is_there()
    (notice,) = [each for each in story.runtime.cell.notices if "policy broke" in each.event]
    assert isinstance(victims, str) is ("victims that are not there" in notice.detail)


def test_a_store_that_finds_only_what_is_in_use_replaces_no_policy() -> None:
    """What a lookup of this step called readable can't go, and that is nobody's fault."""
    story = Served(LRUPolicy, LRUPolicy)
    assert story.serve(0, SLOTS) == SLOTS
    facade = story.runtime.facade
    facade.on_request_started("waits")
    facade.lookup_prefix([b"%08d" % n for n in range(SLOTS)], "waits")
    facade.on_request_started("stores")
    assert facade.prepare_store([b"a", b"b"], "stores") is None
    assert facade.prepare_store([b"c"], "stores") is None
    facade.step_end()
    assert facade.prepare_store([b"a", b"b"], "stores").keys == [b"a", b"b"]
    assert story.replaced() == (0, 0)


NO_MEMORY = MemoryError(), OSError(errno.ENOMEM, "Cannot allocate memory")


@pytest.mark.parametrize("error", NO_MEMORY, ids=["MemoryError", "ENOMEM"])
@pytest.mark.parametrize("where", ["primary", "tier"])
def test_a_policy_that_lacked_memory_for_a_moment_returns(where: str, error: Exception) -> None:
    """It stayed lru until its tier was started again: for the primary tier, until the end."""
    policy = failing("admit", range(2, 3), error)
    story = Served(policy, LRUPolicy) if where == "primary" else Served(LRUPolicy, policy)

    def kind() -> type[EvictionPolicy]:
        (tier,) = story.runtime.tiers
        actor = story.runtime.engine.policy if where == "primary" else tier.bounded.policy.actor
        return type(actor.policy)

    for number in range(5):
        story.serve(4 * number, 4)
    assert kind() is LRUPolicy
    for number in range(5, 5 + TICKS_WITHOUT_MEMORY):
        assert story.serve(4 * number, 4) == 4
        story.assert_policies_know_what_is_there()
    assert kind() is policy
    assert [story.serve(1000 + 4 * number, 4) for number in range(4)] == [4] * 4
    story.assert_policies_know_what_is_there()
    assert sum(story.replaced()) == 1
    said = [each.event for each in story.runtime.cell.notices if "eviction" in each.event]
    assert said == [
        "eviction policy broke, lru takes its place",
        "eviction policy is back, which had no memory",
    ]


@pytest.mark.parametrize("method", ["__init__", "admit", "hold", "choose_victims"])
def test_a_policy_that_lacks_memory_again_is_tried_again(method: str) -> None:
    """Also in the midst of its return, when it is told what is resident."""
    policy = failing("admit", range(2, 3), MemoryError())
    story = Served(policy, LRUPolicy)
    tries = []

    def call(self: LRUPolicy, *arguments: Any, **options: Any) -> Any:
        tries.append(method)
        if len(tries) < 3:
            raise MemoryError
        return getattr(LRUPolicy, method)(self, *arguments, **options)

    setattr(policy, method, call)
    for number in range(4 * TICKS_WITHOUT_MEMORY):
        assert story.serve(4 * number, 4) == 4
        story.assert_policies_know_what_is_there()
    assert len(tries) >= 3
    assert type(story.runtime.engine.policy.policy) is policy


def test_a_policy_that_raised_for_another_reason_does_not_return() -> None:
    """It would raise again, and whoever reads the log should know which one is at work."""
    story = Served(breaking("admit", 2), LRUPolicy)
    for number in range(2 * TICKS_WITHOUT_MEMORY):
        assert story.serve(4 * number, 4) == 4
    assert type(story.runtime.engine.policy.policy) is LRUPolicy


@given(
    where=strategies.booleans(),
    method=strategies.sampled_from(CALLS),
    calls=strategies.integers(0, 12),
    requests=strategies.lists(
        strategies.tuples(strategies.integers(0, 12), strategies.integers(1, 5)),
        min_size=4,
        max_size=14,
    ),
)
def test_lru_knows_just_what_is_resident_whenever_the_policy_raised(
    where: bool,
    method: str,
    calls: int,
    requests: list[tuple[int, int]],
) -> None:
    policy = breaking(method, calls)
    story = Served(policy, LRUPolicy) if where else Served(LRUPolicy, policy)
    for first, count in requests:
        story.serve(first, count)
        story.assert_policies_know_what_is_there()
    assert sum(story.replaced()) <= 1
