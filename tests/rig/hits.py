"""How many tokens of a prompt are found, from DRAM, and from a tier after a restart.

What is right is what is found in DRAM: a tier has the same blocks, and vLLM looks for them in the
same way.
"""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from tests.rig.engine import engine
from tests.rig.fake_model import VOCABULARY, Asked
from tests.rig.shape import Shape
from tests.support.patience import looks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.rig.engine import Engine

TIER: dict[str, Any] = {"type": "fs", "isolation": "thread", "direct": False}
PATIENCE = dict.fromkeys(("probe_timeout_s", "promote_timeout_s", "store_timeout_s"), 3600.0)


class Hits(NamedTuple):
    """Tokens that the connector brought, one number a prompt."""

    dram: list[int]
    restart: list[int]  #: the same prompts, by an engine that has only the tier
    again: list[int]  #: once more by that engine, from its DRAM


def hits(kinds: Sequence[str], lengths: Sequence[int], seed: int = 0, **shape: Any) -> Hits:
    """Play prompts of these lengths, in tokens, one after the other. ``shape``: fields of it."""
    rng = random.Random(seed)
    made = Shape(
        kinds=tuple(kinds),
        slots=400,
        gpu_blocks=40,
        batched_tokens_max=64,
        laziness=0.1,
        tier_laziness=0.1,
        tiers=(TIER | PATIENCE,),
        eviction_policy="lru",
        **shape,
    )
    prompts = [[rng.randrange(VOCABULARY) for _ in range(length)] for length in lengths]
    with tempfile.TemporaryDirectory(prefix="kvtier-rig-") as folder:
        with engine(made, rng, Path(folder)) as running:
            for number, prompt in enumerate(prompts):
                _play(running, f"cold-{number}", prompt)
            dram = [_play(running, f"dram-{number}", each) for number, each in enumerate(prompts)]
        with engine(made, rng, Path(folder)) as running:
            restart, again = (
                [_play(running, f"{name}-{number}", each) for number, each in enumerate(prompts)]
                for name in ("tier", "again")
            )
    return Hits(dram, restart, again)


def _play(running: Engine, name: str, prompt: list[int]) -> int:
    """Play one prompt to its end, and have the GPU forget it. Returns its external hits."""
    running.world.asked[name] = Asked()
    request = Request(
        name,
        list(prompt),
        SamplingParams(max_tokens=2, ignore_eos=True),
        None,
        block_hasher=running.core.request_block_hasher,
    )
    running.core.add_request(request)
    found = request.prefill_stats  # vLLM takes it away when the request has run
    facade = running.facade
    for _ in looks(running.told):
        if request.is_finished() and not (running.has_work or facade.has_pending_work()):
            break
        facade.step_end()
        running.step()
    assert running.core.reset_prefix_cache()
    assert found is not None
    return int(found.num_external_cached_tokens)
