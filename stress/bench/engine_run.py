"""One engine of ``stress.bench engine``, in a process of its own: figures of each phase.

The engine core runs in this process, so that phases can be told apart and manager calls be timed.
"""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING, Any, Final

from kvtier.tools.demo.engine import make_prompts
from stress.bench.driven_engine import DrivenEngine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

ENGINE_BLOCKS: Final = 320  #: of the engine's own KV cache: ten prompts of 1,000 tokens at once
MODEL_TOKENS_MAX: Final = 2_000
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


def main(job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Run the phases of a job, by name."""
    tokens_max = MODEL_TOKENS_MAX + LOAD_OUTPUT_TOKENS
    engine = DrivenEngine(
        job,
        num_gpu_blocks_override=ENGINE_BLOCKS,
        max_model_len=tokens_max,
        max_num_batched_tokens=tokens_max,
    )
    timer = CallTimer(engine.manager)
    count, tokens, seed = job["prompts"], job["prompt_tokens"], job["seed"]
    engine.generate(make_prompts(1, tokens, seed + 1), OUTPUT_TOKENS)  # the engine's warm-up
    known = make_prompts(count, tokens, seed)
    new = make_prompts(count // 2, tokens, seed + 2)
    found = {}
    for name in job["phases"]:
        engine.forget(dram_too=name == DISK)
        timer.restart()
        measured = _under_load(engine, [*known, *new]) if name == LOAD else _alone(engine, known)
        found[name] = {**measured, **timer.figures()}
        engine.settle()
    engine.close()
    yield found


def _alone(engine: DrivenEngine, prompts: Sequence[list[int]]) -> dict[str, Any]:
    """Run prompts one after the other, so that each waits for nothing but its own blocks."""
    generated = [engine.generate([prompt], OUTPUT_TOKENS)[0] for prompt in prompts]
    return {
        "tokens": [each.tokens for each in generated],
        "cached_tokens": sum(each.cached_tokens for each in generated),
        "first_token_s": [each.first_token_s for each in generated],
    }


def _under_load(engine: DrivenEngine, prompts: Sequence[list[int]]) -> dict[str, Any]:
    """Run all prompts at once; none is in the engine's own cache."""
    started = time.perf_counter()
    generated = engine.generate(prompts, LOAD_OUTPUT_TOKENS)
    seconds = time.perf_counter() - started
    tokens = sum(map(len, prompts)) + sum(len(each.tokens) for each in generated)
    return {
        "cached_tokens": sum(each.cached_tokens for each in generated),
        "tokens_per_s": tokens / seconds,
    }


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
