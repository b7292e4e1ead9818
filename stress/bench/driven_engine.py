"""A real engine in a process of its own, which is asked for prompts, order by order.

Its core runs in that process, so that manager calls can be timed, and rests between orders, so that
engines take turns on the machine's cores. ``harness.start_engine`` starts it.
"""

from __future__ import annotations

import functools
import json
import random
import sys
import time
from collections import Counter
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from vllm import SamplingParams
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.inputs import TokensPrompt

from kvtier.errors import InternalError
from kvtier.tools.demo.engine import start_engine
from kvtier.tools.demo.model import VOCABULARY, LlamaShape, make_model
from stress.bench.rated_tier import Rate, RatedBackend

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

PLUGINS: Final = Path(__file__).parents[1] / "plugins"
SETTLE_TIMEOUT_S: Final = 120.0
HUNG_SETTLE_S: Final = 0.2  #: nothing that hangs is waited for

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
"""``take_events`` is not among them: it is a generator in vLLM's manager."""

LOOKUP_CALLS: Final = ("on_new_request", "get_num_new_matched_tokens")
SCHEDULER_CALLS: Final = (
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished_all_groups",
    "has_pending_push_work",
)
WORKER_CALLS: Final = ("handle_preemptions", "start_load_kv", "wait_for_save", "get_finished")
"""Calls of any connector, by whose they are; a lookup is its scheduler's, too."""


def main(job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Start it, then carry out an order a line; the last one is empty."""
    sys.path.append(str(PLUGINS))
    if job.get("imports_numba"):
        _import_numba()
    engine = DrivenEngine(job)
    yield {}
    for line in sys.stdin:
        order = json.loads(line)
        if not order:
            engine.close()
        yield engine.serve(**order) if order else {}


def _import_numba() -> None:
    """Import numba so that vLLM's CPU worker starts nevertheless: LMCache imports it.

    The worker calls ``vars(value).get`` for the attributes of all modules (vLLM 0.32,
    ``triton_utils/dispatcher.py``). What ``llvmlite.binding.ffi.lib`` has for a dictionary is a
    function of the C library: ``'_lib_fn_wrapper' object has no attribute 'get'``. numba
    goes on with the module that it has.
    """
    import_module("numba")
    del sys.modules["llvmlite.binding.ffi"]


class DrivenEngine:
    """vLLM's engine on a model of random weights, and what it is put through.

    ``idle_s``: pause after a step without work, as vLLM's own loop makes in a process of its own.
    """

    def __init__(self, job: dict[str, Any]) -> None:
        model = Path(job["model"])
        if not model.exists():
            make_model(model, LlamaShape(*job["shape"]))
        self._llm = start_engine(job, **job["sizes"])
        core: Any = self._llm.llm_engine.engine_core.engine_core
        self._scheduler = core.scheduler
        self._step_core, core.step_fn = core.step_fn, self._step
        self._idle_s = job.get("idle_s", 0.0)
        self._timer = CallTimer()
        connector = self._scheduler.get_kv_connector()
        if job.get("times_manager"):
            self._timer.time(connector.connector_scheduler.manager)
        if job.get("times_connector"):
            self._timer.time(connector, (*LOOKUP_CALLS, *SCHEDULER_CALLS))
            self._timer.time(get_kv_transfer_group(), WORKER_CALLS)

    def serve(
        self,
        prompts: Sequence[Sequence[tuple[str, int]]],
        output_tokens: int,
        *,
        forget: str = "",
        one_by_one: bool = False,
        rate: Sequence[Any] = Rate(),
    ) -> dict[str, Any]:
        """Generate greedily from all prompts, submitted at once, or one after the other.

        ``prompts``: the seed and the number of tokens of each part of each. ``forget``: what is
        emptied before: the ``gpu``'s prefix cache, or the primary tier, ``dram``, as well.
        """
        RatedBackend.rate = Rate(*rate)
        if forget:
            self._settle()
            if not self._llm.reset_prefix_cache(reset_connector=forget == "dram"):
                raise InternalError("the engine's own prefix cache could not be emptied")
            # kvtier counts steps before it reuses slots after a reset (vLLM 0.32).
            self._settle()
        tokens = [[token for part in parts for token in _tokens(*part)] for parts in prompts]
        batches = [[each] for each in tokens] if one_by_one else [tokens]
        sampling = SamplingParams(
            temperature=0.0, max_tokens=output_tokens, ignore_eos=True, detokenize=False
        )
        self._timer.restart()
        began_s = time.perf_counter()
        outputs: list[Any] = []
        for batch in batches:
            inputs = [TokensPrompt(prompt_token_ids=each) for each in batch]
            outputs += self._llm.generate(inputs, sampling, use_tqdm=False)
        seconds = time.perf_counter() - began_s
        manager_us_per_step, calls_us = self._timer.us_per_step(), self._timer.us_by_call()
        self._settle()
        return {
            "first_token_s": [output.metrics.first_token_latency for output in outputs],
            "cached_tokens": sum(int(output.num_cached_tokens or 0) for output in outputs),
            "tokens": [list(output.outputs[0].token_ids) for output in outputs],
            "seconds": seconds,
            "manager_us_per_step": manager_us_per_step,
            "calls_us": calls_us,
        }

    def close(self) -> None:
        """Shut the engine down."""
        self._llm.llm_engine.engine_core.shutdown()

    def _settle(self) -> None:
        """Step until the engine has nothing to do, its tiers included, unless those hang."""
        hangs = RatedBackend.rate.hangs
        deadline_s = time.monotonic() + (HUNG_SETTLE_S if hangs else SETTLE_TIMEOUT_S)
        while self._scheduler.has_requests():
            self._llm.llm_engine.step()
            if time.monotonic() > deadline_s:
                if hangs:
                    return
                raise InternalError(f"the engine was not at rest after {SETTLE_TIMEOUT_S} s")

    def _step(self) -> Any:  # noqa: ANN401 - vLLM's
        outputs, has_executed = self._step_core()
        if self._idle_s and not has_executed and self._scheduler.has_requests():
            time.sleep(self._idle_s)
        return outputs, has_executed


@functools.lru_cache(maxsize=256)
def _tokens(seed: str, count: int) -> list[int]:
    choose = random.Random(seed)
    return [choose.randrange(3, VOCABULARY) for _ in range(count)]


class CallTimer:
    """Adds up the time spent inside an object's methods, and counts steps."""

    def __init__(self) -> None:
        self._spent_ns: Counter[str] = Counter()
        self._steps = 0

    def time(self, called: Any, names: Sequence[str] = TIMED_CALLS) -> None:  # noqa: ANN401 - any
        """Take the time of these methods from now on; by default, of a manager's."""
        for name in names:
            setattr(called, name, self._timed(name, getattr(called, name)))

    def restart(self) -> None:
        """Begin anew."""
        self._spent_ns.clear()
        self._steps = 0

    def us_per_step(self) -> float:
        """Return what was spent in each step since the last restart."""
        return self._spent_ns.total() / 1e3 / max(1, self._steps)

    def us_by_call(self) -> dict[str, float]:
        """Return what was spent in each method since the last restart."""
        return {name: spent / 1e3 for name, spent in self._spent_ns.items()}

    def _timed(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        ends_step = name == "on_schedule_end"

        @functools.wraps(method)
        def timed(*arguments: object, **named: object) -> object:
            started = time.perf_counter_ns()
            try:
                return method(*arguments, **named)
            finally:
                self._spent_ns[name] += time.perf_counter_ns() - started
                self._steps += ends_step

        return timed
