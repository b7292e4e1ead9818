"""One engine of ``stress.bench decide``, in a process of its own, that does what it is told.

``stress/bench/decide_engines.py`` gives it orders. The engine core runs in this process, and rests
between orders, so that the engines take turns on the machine's cores.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvtier.tools.demo.engine import LlamaShape
from stress.bench.decide_plan import (
    BATCH_TOKENS,
    BLOCK_TOKENS,
    HEAD_SIZE,
    HEADS,
    KV_HEADS,
    LAYERS,
    VOCABULARY,
)
from stress.bench.driven_engine import DrivenEngine
from stress.bench.rated_tier import Rate, RatedBackend, register

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

OUTPUT_TOKENS: Final = 3
OWN_TOKENS: Final = 7  #: at a prompt's end, which nothing else has
IDLE_S: Final = 0.001
"""vLLM's own loop, in the process that users have, waits so long after a step without work."""


def main(job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Start it, then carry out an order a line until there are no more."""
    register(Path(tempfile.mkdtemp()))
    tokens_max = job["tokens_max"] + BLOCK_TOKENS
    engine = DrivenEngine(
        job,
        shape=LlamaShape(LAYERS, HEADS, KV_HEADS, HEAD_SIZE, VOCABULARY, tokens_max),
        block_tokens=BLOCK_TOKENS,
        idle_s=IDLE_S,
        num_gpu_blocks_override=job["clients"] * (tokens_max // BLOCK_TOKENS + 2) + 2,
        max_model_len=tokens_max,
        max_num_batched_tokens=BATCH_TOKENS,
        max_num_seqs=job["clients"] + 1,
    )
    yield {}
    for line in sys.stdin:
        order = json.loads(line)
        yield _serve(engine, **order) if "turn" in order else _store(engine, **order)


def _store(engine: DrivenEngine, tokens: int, count: int) -> dict[str, Any]:
    """Compute prompts, one after the other, and have the tier store them."""
    for number in range(count):
        engine.generate([_prompt(tokens, number)], OUTPUT_TOKENS)
        engine.settle()
    return {"stored_blocks": count * (tokens // BLOCK_TOKENS)}


def _serve(
    engine: DrivenEngine, tokens: int, numbers: Sequence[int], turn: int, rate: Sequence[Any]
) -> dict[str, Any]:
    """Ask for stored prompts, all at once, which neither the GPU nor DRAM has any more."""
    RatedBackend.rate = Rate(*rate)
    engine.forget(hangs=RatedBackend.rate.hangs)
    prompts = [
        _prompt(tokens, number) + _random_tokens(OWN_TOKENS, f"{tokens} {number} {turn}")
        for number in numbers
    ]
    generated = engine.generate(prompts, OUTPUT_TOKENS)
    return {
        "first_token_s": [each.first_token_s for each in generated],
        "cached_tokens": sum(each.cached_tokens for each in generated),
    }


@lru_cache(maxsize=256)
def _prompt(tokens: int, number: int) -> list[int]:
    return _random_tokens(tokens, f"{tokens} {number}")


def _random_tokens(count: int, seed: str) -> list[int]:
    choose = random.Random(seed)
    return [choose.randrange(3, VOCABULARY) for _ in range(count)]
