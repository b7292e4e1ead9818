"""One engine of ``stress.bench decide``, in a process of its own, that does what it is told.

``stress/bench/decide_engines.py`` starts it with a JSON job, writes a JSON order a line to
its stdin, and reads a JSON answer a line from its stdout. The engine core runs in this
process, and rests between orders, so that the engines take turns on the machine's cores.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from vllm import SamplingParams
from vllm.inputs import TokensPrompt

from kvtier.errors import InternalError
from kvtier.tools.demo.engine import LlamaShape, make_model, start_engine
from stress.bench.decide_plan import (
    BATCH_TOKENS,
    BLOCK_TOKENS,
    HEAD_SIZE,
    HEADS,
    KV_HEADS,
    LAYERS,
    VOCABULARY,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

OUTPUT_TOKENS: Final = 3
OWN_TOKENS: Final = 7  #: at a prompt's end, which nothing else has
SETTLE_TIMEOUT_S: Final = 120.0
HUNG_SETTLE_S: Final = 0.2  #: nothing that hangs is waited for
IDLE_S: Final = 0.001
"""vLLM's own loop, in the process that users have, waits so long after a step without work."""

COUNTS: Final = (
    "loads_decided",
    "cuts_decided",
    "recomputes_decided",
    "explorations_decided",
    "prefill_expected_seconds",
    "prefill_seconds",
)
TIER_COUNTS: Final = (
    "promotions_cut",
    "jobs_timed_out",
    "load_expected_seconds",
    "load_seconds",
)


def main() -> None:
    """Carry out orders until there are no more."""
    with os.fdopen(os.dup(1), "w", buffering=1) as answers:
        os.dup2(2, 1)  # what vLLM prints is log
        job = json.loads(sys.argv[1])
        run = DecideEngine(job)
        answers.write("{}\n")
        for line in sys.stdin:
            order = json.loads(line)
            serves = order.pop("do") == "serve"
            answer = run.serve(**order) if serves else run.store(**order)
            answers.write(json.dumps(answer) + "\n")


@lru_cache(maxsize=256)
def _prompt(tokens: int, number: int) -> list[int]:
    choose = random.Random(f"{tokens} {number}")
    return [choose.randrange(3, VOCABULARY) for _ in range(tokens)]


class DecideEngine:
    """The engine, and what it is told to do."""

    def __init__(self, job: dict[str, Any]) -> None:
        tokens_max = job["tokens_max"] + BLOCK_TOKENS
        model = Path(job["model"])
        if not model.exists():
            shape = LlamaShape(LAYERS, HEADS, KV_HEADS, HEAD_SIZE, VOCABULARY, tokens_max)
            make_model(model, shape)
        self.llm = start_engine(
            job,
            BLOCK_TOKENS,
            num_gpu_blocks_override=job["clients"] * (tokens_max // BLOCK_TOKENS + 2) + 2,
            max_model_len=tokens_max,
            max_num_batched_tokens=BATCH_TOKENS,
            max_num_seqs=job["clients"] + 1,
        )
        self._engine = self.llm.llm_engine
        self._core = self._engine.engine_core.engine_core
        self._has_executed = True
        self._core.step_fn = self._noting(self._core.step_fn)
        connector = self._core.scheduler.get_kv_connector()
        self._facade = connector.connector_scheduler.manager.facade
        self._requests = 0

    def _noting(self, step: Any) -> Any:  # noqa: ANN401 - vLLM's
        def noting() -> Any:  # noqa: ANN401 - vLLM's
            outputs, self._has_executed = step()
            return outputs, self._has_executed

        return noting

    def store(self, tokens: int, count: int) -> dict[str, Any]:
        """Compute prompts, one after the other, and have the tier store them."""
        for number in range(count):
            self._generate([_prompt(tokens, number)])
            self._settle()
        return {"stored_blocks": count * (tokens // BLOCK_TOKENS)}

    def serve(
        self, tokens: int, numbers: Sequence[int], turn: int, *, hangs: bool
    ) -> dict[str, Any]:
        """Ask for stored prompts, all at once, which neither the GPU nor DRAM has any more."""
        self._forget(hangs=hangs)
        before = self._counted()
        prompts = []
        for number in numbers:
            choose = random.Random(f"{tokens} {number} {turn}")
            own = [choose.randrange(3, VOCABULARY) for _ in range(OWN_TOKENS)]
            prompts.append(_prompt(tokens, number) + own)
        first_token_s, cached_tokens = self._generate(prompts)
        after = self._counted()
        return {
            "first_token_s": first_token_s,
            "cached_tokens": cached_tokens,
            "counts": {name: after[name] - before[name] for name in after},
        }

    def _generate(self, prompts: Sequence[list[int]]) -> tuple[list[float], int]:
        """Generate greedily from all prompts, submitted at once; return times and cached tokens."""
        sampling = SamplingParams(
            temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True, detokenize=False
        )
        started: dict[str, float] = {}
        seconds: dict[str, float] = {}
        cached = 0
        for prompt in prompts:
            self._requests += 1
            name = f"r{self._requests}"
            started[name] = time.perf_counter()
            self._engine.add_request(name, TokensPrompt(prompt_token_ids=prompt), sampling)
        while self._engine.has_unfinished_requests():
            for output in self._step():
                if output.request_id not in seconds and output.outputs[0].token_ids:
                    seconds[output.request_id] = time.perf_counter() - started[output.request_id]
                if output.finished:
                    cached += int(output.num_cached_tokens or 0)
        return [seconds[name] for name in started], cached

    def _step(self) -> Any:  # noqa: ANN401 - vLLM's outputs
        outputs = self._engine.step()
        if not self._has_executed and self._core.scheduler.has_requests():
            time.sleep(IDLE_S)
        return outputs

    def _forget(self, *, hangs: bool) -> None:
        """Empty the engine's own prefix cache, and the primary tier."""
        self._settle(hangs=hangs)
        if not self.llm.reset_prefix_cache(reset_connector=True):
            raise InternalError("the engine's own prefix cache could not be emptied")
        # kvtier counts steps before it reuses slots after a reset (vLLM 0.32).
        self._settle(hangs=hangs)

    def _settle(self, *, hangs: bool = False) -> None:
        """Step until the engine has nothing to do, its tiers included, unless those hang."""
        deadline = time.monotonic() + (HUNG_SETTLE_S if hangs else SETTLE_TIMEOUT_S)
        while self._core.scheduler.has_requests():
            self._step()
            if time.monotonic() > deadline:
                if hangs:
                    return
                raise InternalError(f"the engine was not at rest after {SETTLE_TIMEOUT_S} s")

    def _counted(self) -> dict[str, float]:
        found = self._facade.statistics()
        counts = {name: getattr(found.primary.counts, name) for name in COUNTS}
        for tier in found.tiers:
            counts |= {name: getattr(tier.counts, name) for name in TIER_COUNTS}
        return counts


if __name__ == "__main__":
    main()
