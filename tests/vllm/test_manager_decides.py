"""The manager tells vLLM that a block is a MISS if it is computed sooner than it is loaded."""

from __future__ import annotations

import pytest
from vllm.v1.kv_offload.base import LookupResult

from tests.vllm.support.stepped_manager import SteppedManager, context, keys, stepped

FS = {"type": "fs", "root_dir": "/nowhere"}
AUTO = {"load_policy": "auto", "prefill_tokens_per_s": 1000.0, "on_reset": "keep"}


def teach(played: SteppedManager, seconds: float) -> None:
    """Have a load of one block take so long, and have the tier alone have what is stored."""
    for name, stored in (("t", keys("T")), ("w", keys("ABC"))):
        played.store(name, stored)
    empty(played)
    taught = played.start(context("taught", keys("T")))
    assert played.manager.lookup(keys("T")[0], taught) is LookupResult.HIT_PENDING
    played.step()
    played.runtime.cell.settle()
    played.now += seconds
    played.answer()
    played.step()
    played.manager.on_request_finished(taught)
    played.step()


def empty(played: SteppedManager) -> None:
    played.manager.reset_cache()
    played.manager.on_reset_flushed()


@pytest.mark.parametrize(
    ("seconds", "first", "rest"),
    [
        (1e-6, LookupResult.HIT_PENDING, LookupResult.HIT_PENDING),
        (5.0, LookupResult.MISS, LookupResult.MISS),
    ],
)
def test_what_is_computed_sooner_is_a_miss(
    seconds: float, first: LookupResult, rest: LookupResult
) -> None:
    with stepped(slots=8, tiers=[FS], **AUTO) as played:
        teach(played, seconds)
        asked = played.start(context("r", keys("ABC")))
        wanted = keys("ABC")
        assert played.manager.lookup(wanted[0], asked) is first
        assert played.manager.lookup(wanted[1], asked) is rest


def test_a_prompt_that_is_in_host_memory_is_a_hit_however_slow_a_tier_is() -> None:
    with stepped(slots=8, tiers=[FS], **AUTO) as played:
        teach(played, 5.0)
        played.store("again", keys("ABC"))
        asked = played.start(context("r", keys("ABC")))
        for key in keys("ABC"):
            assert played.manager.lookup(key, asked) is LookupResult.HIT


def test_blocks_for_which_something_must_be_evicted_are_loaded_too() -> None:
    """The lookup of all keys at once stops there; then each is looked up by itself."""
    with stepped(slots=8, tiers=[FS], **AUTO) as played:
        teach(played, 1e-6)
        played.store("fills", keys("abcdefgh"))
        before = played.facade.statistics().primary.counts
        asked = played.start(context("r", keys("ABC")))
        for key in keys("ABC"):
            assert played.manager.lookup(key, asked) is LookupResult.HIT_PENDING
        counts = played.facade.statistics().primary.counts
        assert counts.loads_decided == before.loads_decided + 1
        assert counts.recomputes_decided == before.recomputes_decided
