"""A real engine whose core runs in this process, step by step: each request can be timed."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from vllm import SamplingParams
from vllm.inputs import TokensPrompt

from kvtier.errors import InternalError
from kvtier.tools.demo.engine import BLOCK_TOKENS, DEMO_SHAPE, make_model, start_engine

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtier.tools.demo.engine import LlamaShape

SETTLE_TIMEOUT_S: Final = 120.0
HUNG_SETTLE_S: Final = 0.2  #: nothing that hangs is waited for


class Generated(NamedTuple):
    """What became of one request."""

    first_token_s: float
    tokens: list[int]
    cached_tokens: int


class DrivenEngine:
    """vLLM's engine on a model of random weights, and what it is put through.

    ``idle_s``: pause after a step without work, as vLLM's own loop makes in a process of its own.
    """

    def __init__(
        self,
        job: dict[str, Any],
        *,
        shape: LlamaShape = DEMO_SHAPE,
        block_tokens: int = BLOCK_TOKENS,
        idle_s: float = 0.0,
        **sizes: int,
    ) -> None:
        model = Path(job["model"])
        if not model.exists():
            make_model(model, shape)
        self._llm = start_engine(job, block_tokens, **sizes)
        self._engine = self._llm.llm_engine
        self._core = self._engine.engine_core.engine_core
        self._step_core = self._core.step_fn
        self._core.step_fn = self._noted_step
        self._has_executed = True
        self._idle_s = idle_s
        self._requests = 0
        self.manager: Any = self._core.scheduler.get_kv_connector().connector_scheduler.manager

    def generate(self, prompts: Sequence[list[int]], output_tokens: int) -> list[Generated]:
        """Generate greedily from all prompts, submitted at once."""
        sampling = SamplingParams(
            temperature=0.0, max_tokens=output_tokens, ignore_eos=True, detokenize=False
        )
        started: dict[str, float] = {}
        first_token_s: dict[str, float] = {}
        ended: dict[str, Generated] = {}
        for prompt in prompts:
            self._requests += 1
            name = f"r{self._requests}"
            started[name] = time.perf_counter()
            self._engine.add_request(name, TokensPrompt(prompt_token_ids=prompt), sampling)
        while self._engine.has_unfinished_requests():
            for output in self._step():
                name, tokens = output.request_id, output.outputs[0].token_ids
                if name not in first_token_s and tokens:
                    first_token_s[name] = time.perf_counter() - started[name]
                if output.finished:
                    cached = int(output.num_cached_tokens or 0)
                    ended[name] = Generated(first_token_s[name], list(tokens), cached)
        return [ended[name] for name in started]

    def forget(self, *, dram_too: bool = True, hangs: bool = False) -> None:
        """Empty the engine's own prefix cache, and the primary tier if asked to."""
        self.settle(hangs=hangs)
        if not self._llm.reset_prefix_cache(reset_connector=dram_too):
            raise InternalError("the engine's own prefix cache could not be emptied")
        # kvtier counts steps before it reuses slots after a reset (vLLM 0.32).
        self.settle(hangs=hangs)

    def settle(self, *, hangs: bool = False) -> None:
        """Step until the engine has nothing to do, its tiers included, unless those hang."""
        deadline = time.monotonic() + (HUNG_SETTLE_S if hangs else SETTLE_TIMEOUT_S)
        while self._core.scheduler.has_requests():
            self._step()
            if time.monotonic() > deadline:
                if hangs:
                    return
                raise InternalError(f"the engine was not at rest after {SETTLE_TIMEOUT_S} s")

    def close(self) -> None:
        """Shut the engine down."""
        self._engine.engine_core.shutdown()

    def _step(self) -> Any:  # noqa: ANN401 - vLLM's outputs
        outputs = self._engine.step()
        if self._idle_s and not self._has_executed and self._core.scheduler.has_requests():
            time.sleep(self._idle_s)
        return outputs

    def _noted_step(self) -> Any:  # noqa: ANN401 - vLLM's
        outputs, self._has_executed = self._step_core()
        return outputs, self._has_executed
