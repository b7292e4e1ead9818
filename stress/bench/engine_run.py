"""One engine of ``stress.bench engine``, in a process of its own.

``stress/bench/children.py`` starts it with a JSON job; its last line on
stdout is the JSON result: one entry a phase. The engine core runs in this
process, so that phases can be told apart and manager calls be timed.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from vllm import SamplingParams
from vllm.inputs import TokensPrompt

from kvtier.errors import InternalError
from kvtier.tools.demo.engine import make_model, make_prompts, start_engine

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ENGINE_BLOCKS: Final = 320  #: of the engine's own KV cache: ten prompts of 1,000 tokens at once
MODEL_TOKENS_MAX: Final = 2_000
SETTLE_TIMEOUT_S: Final = 60.0
OUTPUT_TOKENS: Final = 4
LOAD_OUTPUT_TOKENS: Final = 32

COLD, DRAM, DISK, LOAD, RESTARTED = "cold", "DRAM", "disk", "load", "restarted"
FIRST_ENGINE: Final = (COLD, DRAM, DISK, LOAD)
SECOND_ENGINE: Final = (RESTARTED,)

TIMED_CALLS: Final = (
    "on_new_request",
    "lookup",
    "get_load_source",
    "prepare_load",
    "complete_load",
    "touch",
    "prepare_store",
    "complete_store",
    "on_request_finished",
    "on_schedule_end",
    "has_pending_work",
    "get_stats",
)


def main() -> None:
    """Run the phases of the job in ``argv[1]`` and print their figures."""
    job = json.loads(sys.argv[1])
    model = Path(job["model"])
    if not model.exists():
        make_model(model)
    run = EngineRun(job)
    run.generate(make_prompts(1, job["prompt_tokens"], job["seed"] + 1))  # the engine's warm-up
    known = make_prompts(job["prompts"], job["prompt_tokens"], job["seed"])
    new = make_prompts(job["prompts"] // 2, job["prompt_tokens"], job["seed"] + 2)
    result = {}
    for name in job["phases"]:
        if name == LOAD:
            result[name] = run.load_phase([*known, *new])
        else:
            result[name] = run.phase(known, from_disk=name == DISK)
    run.llm.llm_engine.engine_core.shutdown()
    print(json.dumps(result))


class CallTimer:
    """Adds up the time spent inside a manager's methods, and counts steps.

    ``take_events`` is not among them: it is a generator in vLLM's manager.
    """

    def __init__(self, manager: Any) -> None:  # noqa: ANN401 - either manager
        self._spent_ns: dict[str, int] = {}
        self._calls = 0
        self._steps = 0
        self.restart()
        for name in TIMED_CALLS:
            setattr(manager, name, self._timed(name, getattr(manager, name)))

    def restart(self) -> None:
        """Begin anew."""
        self._spent_ns = dict.fromkeys(TIMED_CALLS, 0)
        self._calls = self._steps = 0

    def figures(self) -> dict[str, Any]:
        """Return what was spent and called since the last restart."""
        steps = max(1, self._steps)
        spent_us = {name: ns / 1e3 for name, ns in self._spent_ns.items()}
        return {
            "steps": self._steps,
            "manager_us": spent_us,
            "manager_us_per_step": sum(spent_us.values()) / steps,
            "manager_calls_per_step": self._calls / steps,
        }

    def _timed(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        ends_step = name == "on_schedule_end"

        @functools.wraps(method)
        def timed(*arguments: object, **named: object) -> object:
            started = time.perf_counter_ns()
            try:
                return method(*arguments, **named)
            finally:
                self._spent_ns[name] += time.perf_counter_ns() - started
                self._calls += 1
                self._steps += ends_step

        return timed


class EngineRun:
    """The engine, and the phases it is put through."""

    def __init__(self, job: dict[str, Any]) -> None:
        tokens_max = MODEL_TOKENS_MAX + LOAD_OUTPUT_TOKENS
        self.llm = start_engine(
            job,
            num_gpu_blocks_override=ENGINE_BLOCKS,
            max_model_len=tokens_max,
            max_num_batched_tokens=tokens_max,
        )
        self._core = self.llm.llm_engine.engine_core.engine_core
        connector = self._core.scheduler.get_kv_connector()
        self._timer = CallTimer(connector.connector_scheduler.manager)

    def generate(self, prompts: Sequence[list[int]], output_tokens: int = OUTPUT_TOKENS) -> Any:  # noqa: ANN401 - vLLM's outputs
        """Generate greedily from all prompts, submitted at once."""
        sampling = SamplingParams(
            temperature=0.0, max_tokens=output_tokens, ignore_eos=True, detokenize=False
        )
        return self.llm.generate(
            [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts], sampling, use_tqdm=False
        )

    def phase(self, prompts: Sequence[list[int]], *, from_disk: bool) -> dict[str, Any]:
        """Run prompts one after the other, so that each waits for nothing but its own blocks."""
        self._forget(dram_too=from_disk)
        outputs = [self.generate([prompt])[0] for prompt in prompts]
        figures = self._timer.figures()
        self._settle()
        return {
            "tokens": [list(output.outputs[0].token_ids) for output in outputs],
            "cached_tokens": sum(int(output.num_cached_tokens or 0) for output in outputs),
            "first_token_s": [output.metrics.first_token_latency for output in outputs],
            **figures,
        }

    def load_phase(self, prompts: Sequence[list[int]]) -> dict[str, Any]:
        """Run all prompts at once; none is in the engine's own cache."""
        self._forget(dram_too=False)
        started = time.perf_counter()
        outputs = self.generate(prompts, LOAD_OUTPUT_TOKENS)
        seconds = time.perf_counter() - started
        figures = self._timer.figures()
        self._settle()
        tokens = sum(map(len, prompts)) + sum(
            len(output.outputs[0].token_ids) for output in outputs
        )
        return {
            "cached_tokens": sum(int(output.num_cached_tokens or 0) for output in outputs),
            "tokens_per_s": tokens / seconds,
            **figures,
        }

    def _forget(self, *, dram_too: bool) -> None:
        """Empty the engine's own prefix cache, and the primary tier if asked to."""
        self._settle()
        if not self.llm.reset_prefix_cache(reset_connector=dram_too):
            raise InternalError("the engine's own prefix cache could not be emptied")
        self._settle()  # kvtier counts steps before it reuses slots after a reset (vLLM 0.32)
        self._timer.restart()

    def _settle(self) -> None:
        """Step until the engine has nothing to do, its tiers included."""
        deadline = time.monotonic() + SETTLE_TIMEOUT_S
        while self._core.scheduler.has_requests():
            self.llm.llm_engine.step()
            if time.monotonic() > deadline:
                raise InternalError(f"the engine was not at rest after {SETTLE_TIMEOUT_S} s")


if __name__ == "__main__":
    main()
