"""What vLLM's own connector offers after a reset, and what is stored of it.

It offers all blocks of a running request again. With a sliding window, some of these
have left the window since, and the GPU's block is another request's by now.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from vllm.v1.kv_offload.base import OffloadingManager

from tests.vllm.support.connector import BLOCK_TOKENS, connector

if TYPE_CHECKING:
    from collections.abc import Sequence

WINDOW = 2 * BLOCK_TOKENS
MENDED = hasattr(OffloadingManager, "on_reset_flushed")  #: vLLM 0.33
PROMPT = range(10 * BLOCK_TOKENS)


def stored(meta: Any) -> int:
    """Return how many blocks a step begins to store."""
    return sum(len(job.dst_spec.block_ids) for job in meta.store_jobs.values())


@pytest.mark.parametrize("windows", [(None,), (WINDOW,), (None, WINDOW)])
def test_what_runs_at_a_reset_stores_nothing_that_was_computed_before(
    windows: Sequence[int | None],
) -> None:
    """The rig's seed 1022: KV of another request was stored, and served to a third."""
    with connector(slots=64, windows=windows) as engine:
        engine.start("r", PROMPT)
        assert engine.matched("r") == 0
        meta = engine.end_step(["r"])
        assert stored(meta)
        engine.complete(meta)
        engine.real.reset_cache()
        assert stored(engine.end_step(["r"])) == 0
        engine.finish("r")
        assert engine.primary().ready_slots == 0


@pytest.mark.parametrize("windows", [(None,), (None, WINDOW)])
def test_who_is_preempted_at_a_reset_computes_and_stores_all_again(
    windows: Sequence[int | None],
) -> None:
    """As ``reset_running_requests`` has it: the blocks are new, and so are the weights."""
    with connector(slots=64, windows=windows) as engine:
        engine.start("r", PROMPT)
        engine.matched("r")
        before = engine.end_step(["r"])
        engine.real.reset_cache()
        assert engine.matched("r") == 0
        assert stored(engine.end_step(["r"], resumed=["r"])) == stored(before)


@pytest.mark.parametrize("windows", [(None,), (None, WINDOW)])
def test_who_is_thrown_back_within_a_step_loads_without_harm(windows: Sequence[int | None]) -> None:
    """As ``reset_running_requests`` has it, where vLLM refuses the reset or leaves the connector.

    The connector of vLLM 0.32 ends the engine over a load of a request that it reports as
    preempted in the same step: there it loads in the next one.
    """
    with connector(slots=64, windows=windows) as engine:
        engine.start("r", PROMPT)
        assert engine.matched("r") == 0
        engine.complete(engine.end_step(["r"]))
        tokens = engine.matched("r")
        if not MENDED:
            assert tokens is None
            engine.end_step(preempted=["r"])
            tokens = engine.matched("r")
        assert tokens
        engine.load("r", tokens)
        engine.complete(engine.end_step(preempted=["r"] if MENDED else []))


def test_a_request_that_only_seems_to_run_waits_for_one_step_at_most() -> None:
    """Its load failed, say: vLLM asks anew, and reports nothing."""
    with connector(slots=64) as engine:
        engine.start("r", PROMPT)
        assert engine.matched("r") == 0
        engine.complete(engine.end_step(["r"]))
        for _ in range(2):  # in the same step
            assert bool(engine.matched("r")) is MENDED
        engine.end_step()
        assert engine.matched("r")


def test_a_reset_keeps_those_that_came_later_from_nothing() -> None:
    with connector(slots=64) as engine:
        engine.start("r", PROMPT)
        engine.matched("r")
        engine.complete(engine.end_step(["r"]))
        engine.real.reset_cache()
        engine.finish("r")
        assert engine.store("r", PROMPT) == 10, "the same name, another request"
