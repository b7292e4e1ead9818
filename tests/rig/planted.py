"""Mistakes that the rig must find: each is one function in another's place."""

from __future__ import annotations

import inspect
import textwrap
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
)
from vllm.v1.core import kv_cache_utils

from kvtier.core.generations import Generations
from kvtier.engine.primary.load_completions import LoadCompletions
from kvtier.engine.primary.lookups import Lookups
from kvtier.engine.primary.primary_tier import PrimaryTier
from kvtier.engine.primary.requests import Request
from kvtier.engine.primary.slot_table import SlotTable
from kvtier.plugin_api.slot_memory import SlotMemory
from kvtier.vllm.identity import page_facts, weight_updates
from kvtier.vllm.identity.weight_updates import EngineWeights, Update
from kvtier.vllm.memory import cpu_worker, group_parts
from kvtier.vllm.scheduler.kv_events import KVEvents
from kvtier.vllm.workarounds import connector_hooks
from kvtier.vllm.workarounds.resumed import ResumedRequests
from tests.rig.device import LateWorker
from tests.rig.shape import PARTS, RELEASE

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
        def submit_later(self: Any, job_id: int, src: Any, dst: Any, *_: Any, **__: Any) -> bool:
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
    return patch.object(Generations, "begin", lambda *_, **__: None)


def hear_no_call_that_writes_weights() -> Any:
    """Weights are others only once samples say so, which are not taken at each step."""
    return patch.object(weight_updates, "may_write", lambda _: False)


def compare_no_samples_of_weights() -> Any:
    """Weights are others only if somebody calls what vLLM has for it."""
    return patch.object(EngineWeights, "_is_other", lambda *_: False)


def name_weights_by_their_version_alone() -> Any:
    """Version "1" of another update serves what it has."""
    return patch.object(Update, "version", lambda self, _: self.name or None)


def leave_the_blocks_for_drafts_out_of_the_name() -> Any:
    """A state of an engine with other drafts begins elsewhere in its page."""
    return patch.dict(page_facts.HARMLESS, {"num_speculative_blocks": "planted"})


def leave_the_layout_of_states_out_of_the_name() -> Any:
    """States that were stored by rows are read by columns."""
    return patch.object(page_facts, "_states", lambda _: None)


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


def complete_a_load_from_before_a_reset() -> Any:
    """The load that the request does now loses its pin."""
    return _rewritten(PrimaryTier, "_complete_load", "message.epoch == self.epoch", "True")


def accept_a_promotion_from_before_a_reset() -> Any:
    """What a tier read before the reset fills a slot that is nobody's."""
    return _rewritten(LoadCompletions, "_ended", "message.epoch != self._epoch", "False")


def use_slots_at_once_after_a_reset() -> Any:
    """Workers still copy to and from slots that were in use at the reset."""
    return _rewritten(
        PrimaryTier,
        "_reset",
        "self._cascades.reset()",
        "self._cascades.reset(); self.slots.gpu_flushed()",
    )


def let_all_adapters_share_blocks() -> Any:
    """vLLM names a block by its tokens and salt alone."""
    return patch.object(kv_cache_utils, "_gen_lora_extra_hash_keys", lambda _: [])


def pin_a_block_for_one_of_two_readers() -> Any:
    """The first of two samples of a prompt that has loaded its blocks releases them for both."""

    def pin(self: SlotTable, slots: Any) -> None:
        self.pins.update(dict.fromkeys(slots, 1))

    def unpin(self: SlotTable, slots: Any) -> None:
        for slot in slots:
            self.pins.pop(slot, None)

    planted = ExitStack()
    planted.enter_context(patch.object(SlotTable, "pin", pin))
    planted.enter_context(patch.object(SlotTable, "unpin", unpin))
    return planted


def tell_nobody_what_is_gone() -> Any:
    """Routers go on to send requests for it."""
    return _rewritten(
        KVEvents,
        "_removed",
        "announced = self._places",
        "return\n    announced = self._places",
    )


def announce_only_the_first_block_of_several() -> Any:
    """Routers never learn of the rest."""
    return _rewritten(
        KVEvents,
        "_stored",
        "self._emit_stored(number, keys)",
        "self._emit_stored(number, keys[:1])",
    )


def remove_at_once_what_routers_have_and_what_they_have_not() -> Any:
    """Where two tiers have one medium, Dynamo ends a removal at what the other's has removed."""
    return _rewritten(
        KVEvents,
        "_withdraw",
        "elsewhere.union(gone)))\n    self._emit_removed(number, gone)",
        "elsewhere))",
    )


def load_at_once_for_who_was_thrown_back() -> Any:
    """vLLM's connector ends the engine over it."""
    return patch.object(ResumedRequests, "may_load", lambda _self, _runs: True)


def take_who_is_to_ask_again_for_who_waits() -> Any:
    """Where chunks differ in length, vLLM may let it run: the rig's seed 1776."""

    def may_load(self: Any, runs: Any) -> bool:
        may = real(self, runs)
        if not may:
            self.on_wait(runs)
        return may

    real = ResumedRequests.may_load
    return patch.object(ResumedRequests, "may_load", may_load)


def take_the_next_table_of_a_session_for_more_of_the_last() -> Any:
    """Leave vLLM 0.32 as it is."""
    connector_hooks.hook_connector()
    method = OffloadingConnectorScheduler.build_connector_meta
    return patch.object(OffloadingConnectorScheduler, method.__name__, method.__wrapped__)


def leave_in_a_slot_what_was_there() -> Any:
    """A tier gets to see the end of a longer block, of another request."""
    return patch.object(SlotMemory, "clear_rests", lambda *_: None)


def take_a_part_for_shorter_than_it_is() -> Any:
    """Of a block's layers that lie side by side, a group loses all but the first."""
    return patch.object(
        group_parts, "_end_in_block", lambda _pages, _name, page_bytes, _: page_bytes
    )


def load_states_in_the_step_that_computes_with_them() -> Any:
    """Leave vLLM 0.33 as it is where ``sync_load_budget_bytes`` is set."""
    return patch.object(connector_hooks, "_loads_states_at_once", lambda *_: False)


_RESETS = {
    "resets": 0.1,
    "updates": 0.0,
    "aborts": 0.0,
    "arrivals": 0.4,
    "laziness": 0.9,
    "slots": 40,
    "gpu_blocks": 0,
    "running_max": 8,
    "names": 3,
    "families": 1,
    "late_callers": 0.1,
}
_TIER = {"type": "memory", "capacity_bytes": 4096 * 1000}
_EVICTIONS = {
    "kinds": ("full",),
    "ranks": 1,
    "canonical": False,
    "tiers": (_TIER,),
    "tier_laziness": 0.9,
    "slots": 8,
    "gpu_blocks": 0,
    "running_max": 8,
    "batched_tokens_max": 64,
    "requests": 40,
    "families": 2,
    "forgets": 0.1,
    "updates": 0.05,
}
_LOADS = {
    **_RESETS,
    "asynchronous": False,
    "batched_tokens_max": 64,
    "requests": 40,
    "names": 2,
    "keeps": True,
    "tiers": (_TIER,),
    "tier_laziness": 0.1,
    "forgets": 0.3,
    "late_callers": 0.01,
}
_PROMOTIONS = {
    "resets": 0.05,
    "updates": 0.0,
    "keeps": True,
    "tiers": (_TIER,),
    "slots": 13,
    "tier_laziness": 0.9,
    "gpu_blocks": 0,
    "families": 2,
}
_SAMPLES = {"slots": 20, "gpu_blocks": 0, "families": 2, "samples_max": 3, "laziness": 0.9}
_EVENTS = {
    "kinds": ("full",),
    "blocks_per_chunk": 1,
    "events": True,
    "forgets": 0.0,
    "slots": 20,
    "tiers": (_TIER,),
}
_THROWN_BACK = {"throws_back": True, "forgets": 0.2, "slots": 40, "tiers": (), "resets": 0.0}
_UNEQUAL = {
    **_THROWN_BACK,
    "kinds": ("full", "half:9"),
    "blocks_per_chunk": 1,
    "names": 5,
    "requests": 20,
}
_WITHDRAWN = {**_EVENTS, "resets": 0.1, "arrivals": 0.4, "slots": 8}

_UPDATES = {**_EVICTIONS, "updates": 0.1, "slots": 40, "resets": 0.0, "late_callers": 0.0}
_LIVES = {
    "kinds": ("full", "mamba"),
    "lives": 2,
    "families": 1,
    "slots": 40,
    "unit": None,
    "checkpoints": False,
    "sessions": 0.0,
    "events": False,
    "tiers": ({"type": "fs", "isolation": "thread", "direct": False},),
}
_STATES = {
    "kinds": ("full", "mamba"),
    "contexts": 1,
    "stages": 1,
    "unit": None,
    "speculates": 0,
    "sessions": 0.0,
    "events": False,
    "gpu_blocks": 0,
    "slots": 100,
    "options": (("sync_load_budget_bytes", 1 << 20),),
}

_OF_0_33 = ((load_states_in_the_step_that_computes_with_them, _STATES, 0),)
_OF_0_32 = (
    (take_the_next_table_of_a_session_for_more_of_the_last, {"sessions": 0.5}, 0),
    (load_at_once_for_who_was_thrown_back, _THROWN_BACK, 0),
    (take_who_is_to_ask_again_for_who_waits, _UNEQUAL, 0),
)

_OF_THE_RELEASE = _OF_0_32 if RELEASE < (0, 33) else _OF_0_33
OF_THE_RELEASE = [mistake.__name__ for mistake, *_ in _OF_THE_RELEASE]

MISTAKES: dict[str, tuple[Callable[[], Any], dict[str, Any], int]] = {
    each.__name__: (each, {"throws_back": False, **focus}, first)
    for each, focus, first in (
        (load_from_another_slot, {}, 1),
        (report_before_the_copy, {}, 12),
        (find_what_older_weights_computed, {"updates": 0.1}, 14),
        (hear_no_call_that_writes_weights, {**_UPDATES, "caches": False}, 0),
        (compare_no_samples_of_weights, _UPDATES, 0),
        (name_weights_by_their_version_alone, _UPDATES, 0),
        (leave_the_blocks_for_drafts_out_of_the_name, _LIVES, 0),
        (leave_the_layout_of_states_out_of_the_name, _LIVES, 0),
        (take_back_a_hit_that_was_counted, _EVICTIONS, 0),
        (complete_a_store_from_before_a_reset, _RESETS, 0),
        (complete_a_load_from_before_a_reset, _LOADS, 0),
        (accept_a_promotion_from_before_a_reset, _PROMOTIONS, 0),
        (use_slots_at_once_after_a_reset, _RESETS, 0),
        (let_all_adapters_share_blocks, {"adapters": 2, "families": 1}, 1),
        (pin_a_block_for_one_of_two_readers, _SAMPLES, 2),
        (tell_nobody_what_is_gone, _EVENTS, 2),
        (announce_only_the_first_block_of_several, _EVENTS, 0),
        (remove_at_once_what_routers_have_and_what_they_have_not, _WITHDRAWN, 0),
        (leave_in_a_slot_what_was_there, PARTS["two layers and one"], 0),
        (take_a_part_for_shorter_than_it_is, PARTS["pages of three sizes, side by side"], 0),
        *_OF_THE_RELEASE,
    )
}
"""Each mistake, what of a shape is not drawn, and the first seed of those that are played.

The next of them that shows the mistake differs from run to run: the order of sets does.
"""
