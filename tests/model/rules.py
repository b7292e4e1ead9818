"""What all rules of the state machine share.

Rules are the design's verbs. Their small integers pick one of what there is.
A ``schedule`` says in which order the mailboxes are delivered during a facade
call; the empty one is the engine cell's own order, towards which Hypothesis
shrinks.
"""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from hypothesis import strategies as st
from hypothesis.stateful import precondition

from kvtier.policies.eviction.lru import LRUPolicy

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from world import Request, World

    from kvtier.plugin_api.eviction_policy import EvictionPolicy

SCHEDULES = st.one_of(st.just(b""), st.binary(max_size=10))
PICKS = st.integers(0, 7)
T = TypeVar("T")


def is_due(name: str, pause: int, also: Callable[[Rules], object] = bool) -> Callable[..., Any]:
    """Let a rule run only now and then, so that what lies between can become interesting.

    Its name is due ``pause`` rules after it last ran. ``also``: a precondition.
    """

    def is_due_now(self: Rules) -> bool:
        since = self.world.rules_run - self.world.last_run.get(name, 0)
        return since >= pause and bool(also(self))

    def decorate(method: Any) -> Any:
        @wraps(method)
        def run(self: Rules, *args: Any, **kwargs: Any) -> Any:
            self.world.last_run[name] = self.world.rules_run
            return method(self, *args, **kwargs)

        return precondition(is_due_now)(run)

    return decorate


def pick(among: Sequence[T], number: int) -> T:
    """Return one of several."""
    return among[number % len(among)]


class Rules:
    """A mixin for a state machine with a ``world``; its rules are in the classes below it."""

    world: World
    make_policy: ClassVar[type[EvictionPolicy]] = LRUPolicy

    def _request(self, which: int) -> Request:
        return pick(list(self.world.requests.values()), which)

    def _run_engine(self) -> None:
        self.world.in_order(b"")
        self.world.facade.get_finished()
