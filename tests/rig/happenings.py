"""What happens to an engine between its steps: each is drawn, and each is vLLM's own call."""

from __future__ import annotations

import random
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import Request

from tests.rig.engine import MODEL_TOKENS_MAX
from tests.rig.fake_model import VOCABULARY

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.rig.engine import Engine
    from tests.rig.shape import Shape


class Happenings:
    """Draws what happens. ``step`` runs one step of the engine."""

    def __init__(
        self, running: Engine, shape: Shape, rng: random.Random, step: Callable[[], None]
    ) -> None:
        self._engine = running
        self._shape = shape
        self._rng = rng
        self._step = step
        self.requests_to_come = shape.requests
        self.void = 0  #: blocks of completions from before a reset
        self._from_before: list[Callable[[], None]] = []

    def happen(self) -> None:
        """Let some things happen, or none."""
        shape, happens = self._shape, self._happens
        if self.requests_to_come and happens(shape.arrivals):
            self._add_request()
        if happens(shape.aborts):
            self._abort()
        if happens(shape.forgets):
            self._engine.core.reset_prefix_cache()
        if happens(shape.resets):
            self._reset()
        if happens(shape.updates):
            self._pause_and_reset(new_weights=happens(0.7))
        while self._from_before and happens(0.3):
            self._from_before.pop(0)()

    def _happens(self, chance: float) -> bool:
        return self._rng.random() < chance

    # --- requests ---

    def _add_request(self) -> None:
        rng, shape = self._rng, self._shape
        name = f"r{rng.randrange(shape.names)}"
        if self._engine.knows_request(name):
            return  # an id is used again, but only once vLLM has forgotten who had it
        self.requests_to_come -= 1
        output = rng.randrange(1, shape.output_tokens_max + 1)
        sampling = SamplingParams(max_tokens=output, ignore_eos=True)
        sampling.extra_args = {"kv_transfer_params": self._transfer_params()}
        salt = rng.choice(["", "salt"]) if shape.salted else ""
        self._engine.world.salts[name] = salt
        core = self._engine.core
        core.add_request(
            Request(
                name,
                self._prompt()[: MODEL_TOKENS_MAX - output - 1],
                sampling,
                None,
                cache_salt=salt or None,
                block_hasher=core.request_block_hasher,
            )
        )

    def _transfer_params(self) -> dict[str, Any] | None:
        """Draw what a client may ask of the connector for one request."""
        rng = self._rng
        if not self._happens(self._shape.asks):
            return None
        return rng.choice(
            [
                {"max_load_tokens": rng.choice([0, 3, 4, 9, 16, 30])},
                {"max_offload_tokens": rng.choice([0, 5, 16])},
                {"kv_load_tiers": rng.choice([[], [{"medium": "CPU"}], [{"medium": "DISK"}]])},
            ]
        )

    def _prompt(self) -> list[int]:
        """Draw one that shares a prefix with others."""
        rng = self._rng
        family = random.Random(rng.randrange(self._shape.families))
        longest = self._shape.prompt_tokens_max
        length = rng.randrange(longest // 2 if rng.random() < 0.6 else 1, longest + 1)
        prompt = [family.randrange(VOCABULARY) for _ in range(length)]
        if rng.random() < 0.3:
            cut = rng.randrange(length)
            prompt[cut:] = [rng.randrange(VOCABULARY) for _ in range(length - cut)]
        return prompt

    def _abort(self) -> None:
        names = sorted(self._engine.scheduler.requests)
        if not names:
            return
        chosen = [self._rng.choice(names)]
        if self._happens(0.5):
            self._engine.core.abort_requests(chosen)
        else:  # while a step runs
            self._engine.core.aborts_queue.put_nowait(chosen)

    # --- resets ---

    def _reset(self) -> None:
        """Reset the connector as it is, with loads and stores under way."""
        if self._engine.may_be_reset:
            self._keep_completions()
            self._engine.core.reset_prefix_cache(reset_connector=True)

    def _pause_and_reset(self, *, new_weights: bool) -> None:
        """Update the weights as an RL loop does: pause, reset all, replace them, go on.

        vLLM refuses to reset running requests while a load is under way, so those end first.
        """
        if not self._engine.may_be_reset:
            return
        scheduler = self._engine.scheduler
        scheduler.set_pause_state(PauseState.PAUSED_NEW)
        while scheduler.kv_holding_waiting or self._engine.is_loading:
            self._step()
        scheduler.set_pause_state(PauseState.PAUSED_ALL)
        while self._engine.computes:
            self._step()
        self._engine.core.model_executor.collective_rpc("synchronize_device")
        self._keep_completions()
        done = self._engine.core.reset_prefix_cache(
            reset_running_requests=True, reset_connector=True
        )
        assert done, "vLLM has not reset all"
        if new_weights:
            self._engine.world.weights += 1
        scheduler.set_pause_state(PauseState.UNPAUSED)

    def _keep_completions(self) -> None:
        """Have what is under way completed after the reset, with the epoch that it began in.

        vLLM's connector drops such completions; another caller of the facade need not.
        """
        if not self._shape.late_callers:
            return
        facade = self._engine.facade
        epoch = facade.epoch
        for job in self._engine.jobs():
            complete = facade.complete_store if job.is_store else facade.complete_load
            self._from_before.append(partial(complete, sorted(job.keys), job.req_id, epoch=epoch))
            self.void += len(job.keys)

    def end(self) -> None:
        """Let happen what is still to come."""
        while self._from_before:
            self._from_before.pop(0)()
