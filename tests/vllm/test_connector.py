"""vLLM's own connector over kvtier: what is read for its groups, and stored after a reset.

Where there are two groups, a prompt needs 24 blocks with full attention and the last four of a
window of 16 tokens: 28 blocks, of which 27 serve 92 tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from vllm.v1.kv_offload.base import OffloadingManager

from tests.vllm.support.connector import BLOCK_TOKENS, connector

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

WINDOW = 4 * BLOCK_TOKENS
GROUPS = (None, WINDOW)
PROMPT = range(24 * BLOCK_TOKENS)
SERVED = 92  #: a window's blocks end at 92: the prompt's last token is always computed


@pytest.mark.parametrize(
    ("slots", "max_load_tokens", "served", "read"),
    [
        # 27 blocks were read for 28 slots, and 0 tokens served.
        (28, 10**6, SERVED, 27),
        # The tier has the window of one token only; without it all other blocks are of no use.
        (27, 10**6, 0, 0),
        # No window was stored that early, so nothing is served, and nothing read.
        (100, 40, 0, 0),
    ],
)
def test_what_can_be_served_is_read_and_nothing_else(
    tmp_path: Path, slots: int, max_load_tokens: int, served: int, read: int
) -> None:
    tiers = [{"type": "fs", "root_dir": str(tmp_path / "kv")}]
    with connector(slots=1024, windows=GROUPS, secondary_tiers=tiers) as engine:
        assert engine.store("a", PROMPT) == 28
    with connector(slots=slots, windows=GROUPS, secondary_tiers=tiers) as engine:
        engine.start("a", PROMPT, max_load_tokens=max_load_tokens)
        assert engine.match("a") == {"a": served}
        assert engine.tier().counts.read_bytes == read * engine.manager._memory.block_bytes


def stored(meta: Any) -> int:
    """Return how many blocks a step begins to store."""
    return sum(len(job.dst_spec.block_ids) for job in meta.store_jobs.values())


@pytest.mark.parametrize("windows", [(None,), (WINDOW,), GROUPS])
def test_what_runs_at_a_reset_stores_nothing_that_was_computed_before(
    windows: Sequence[int | None],
) -> None:
    """vLLM offers all blocks again. The rig's seed 1022: KV of another request was stored."""
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
        assert engine.store("r", PROMPT) == stored(meta), "the same name, another request"


@pytest.mark.parametrize("windows", [(None,), (WINDOW,), GROUPS])
def test_what_waits_at_a_reset_is_stored_though_nothing_is_looked_up_for_it(
    windows: Sequence[int | None],
) -> None:
    """As for the log probabilities of a prompt, or one that vLLM's own prefix cache has whole."""
    with connector(slots=64, windows=windows) as engine:
        engine.start("r", PROMPT, max_load_tokens=0)
        engine.real.reset_cache()
        assert engine.matched("r") == 0
        meta = engine.end_step(["r"])
        assert stored(meta)
        engine.complete(meta)
        engine.finish("r")


@pytest.mark.parametrize("windows", [(None,), GROUPS])
def test_who_is_thrown_back_within_a_step_loads_without_harm(
    windows: Sequence[int | None],
) -> None:
    """As ``reset_running_requests`` has it, where vLLM refuses the reset or leaves the connector.

    The connector of vLLM 0.32 ends the engine over a load of a request that it reports as
    preempted in the same step: there it loads in the next one. So does one that only seems to run,
    since its load failed, say: vLLM reports nothing of it.
    """
    is_mended = hasattr(OffloadingManager, "on_reset_flushed")  # vLLM 0.33
    for reported in (["r"], []):
        with connector(slots=64, windows=windows) as engine:
            engine.start("r", PROMPT)
            assert engine.matched("r") == 0
            engine.complete(engine.end_step(["r"]))
            for _ in range(2):  # in the same step
                tokens = engine.matched("r")
                assert bool(tokens) is is_mended
            if not is_mended:
                engine.end_step(preempted=reported)
                tokens = engine.matched("r")
            assert tokens
            engine.load("r", tokens)
            engine.complete(engine.end_step(preempted=reported if is_mended else []))
