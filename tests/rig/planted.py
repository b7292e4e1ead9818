"""Mistakes that the rig must find: each is one function in another's place."""

from __future__ import annotations

import inspect
import textwrap
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np

from kvtier.core.generations import Generations
from kvtier.engine.lookups import Lookups
from kvtier.engine.primary_tier import PrimaryTier
from kvtier.engine.requests import Request
from kvtier.vllm import cpu_worker
from tests.rig.device import LateWorker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def load_from_another_slot() -> Any:
    """Copy the first block of each load from the slot beside the one it is in."""
    real = cpu_worker._load

    def load(route: Any, plan: Any) -> int:
        slots = np.array(plan.slots)
        slots[:1] = (slots[:1] + 1) % route.host.shape[0]
        return real(route, cpu_worker._Plan(plan.routes, plan.blocks, slots, plan.sub_blocks))

    return patch.object(cpu_worker, "_load", load)


@contextmanager
def report_before_the_copy() -> Iterator[None]:
    """Report a copy once it is queued, and copy later: as a worker does that asks no event."""
    real_finished = LateWorker.get_finished

    def submit(kind: str) -> Any:
        def submit_later(self: Any, job_id: int, src: Any, dst: Any, *_: Any) -> bool:
            def copy() -> None:
                getattr(self.real, kind)(job_id, src, dst)
                self.real.get_finished()

            self._device.copy(kind.removeprefix("submit_"), job_id, copy)
            self.__dict__.setdefault("reported", []).append(job_id)
            return True

        return submit_later

    def get_finished(self: Any) -> list[Any]:
        real_finished(self)
        reported, self.reported = self.__dict__.get("reported", []), []
        return [_result(job) for job in reported]

    with (
        patch.object(LateWorker, "submit_store", submit("submit_store")),
        patch.object(LateWorker, "submit_load", submit("submit_load")),
        patch.object(LateWorker, "get_finished", get_finished),
    ):
        yield


def _result(job: int) -> Any:
    return cpu_worker.TransferResult(job, True, 1, 0.0)


def _rewritten(owner: Any, name: str, old: str, new: str) -> Any:
    """Put a function with one line of it changed in the place of another."""
    real = getattr(owner, name)
    source = textwrap.dedent(inspect.getsource(real))
    assert source.count(old) == 1, f"{name} has no longer one {old!r}"
    made: dict[str, Any] = {}
    exec(f"from __future__ import annotations\n{source.replace(old, new)}", real.__globals__, made)
    return patch.object(owner, name, made[name])


def find_what_older_weights_computed() -> Any:
    """A reset empties the primary tier, and tiers serve what they have."""
    return patch.object(Generations, "begin", lambda *_: None)


@contextmanager
def take_back_a_hit_that_was_counted() -> Iterator[None]:
    """A key that was a hit, was evicted and is looked up again becomes a miss."""
    with ExitStack() as stack:
        for name in ("lookup", "lookup_prefix"):
            planted = _rewritten(Lookups, name, "if key not in request.hits:", "if True:")
            stack.enter_context(planted)
        stack.enter_context(patch.object(Request, "count", _count_both_ways))
        yield


def _count_both_ways(self: Request, counts: Any) -> None:
    queries, hits = len(self.hits | self.misses), len(self.hits - self.misses)
    counts.queries += queries - self._queries_counted
    counts.hits += hits - self._hits_counted
    self._queries_counted, self._hits_counted = queries, hits


def complete_a_store_from_before_a_reset() -> Any:
    """The block that is being stored now becomes READY unwritten."""
    return _rewritten(PrimaryTier, "_complete_store", "message.epoch != self.epoch", "False")


_RESETS = {"resets": 0.2, "aborts": 0.0, "arrivals": 0.4, "laziness": 0.9, "slots": 40}

MISTAKES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    each.__name__: (each, focus)
    for each, focus in (
        (load_from_another_slot, {}),
        (report_before_the_copy, {}),
        (find_what_older_weights_computed, {"updates": 0.1}),
        (take_back_a_hit_that_was_counted, {}),
        (complete_a_store_from_before_a_reset, {**_RESETS, "late_callers": True}),
    )
}
"""Each mistake, and what of a shape is not drawn, so that a few scenarios are enough."""
