"""One scenario: requests come, are aborted, and end; then all must be at rest.

Everything in it is drawn from its seed, so the seed plays it again.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from tests.rig.engine import MODEL_TOKENS_MAX, engine
from tests.rig.fake_model import VOCABULARY
from tests.rig.shape import Shape, draw_shape

if TYPE_CHECKING:
    from tests.rig.engine import Engine

STEPS_MAX = 5_000


class NotAtRest(AssertionError):
    """Raised when a scenario does not end as it must."""


@dataclass(frozen=True)
class Played:
    """What a scenario did."""

    steps: int
    tokens_checked: int
    loads: int


def play(seed: int, shape: Shape | None = None) -> Played:
    """Play the scenario of a seed. Raises what went wrong, with seed and shape in a note."""
    rng = random.Random(seed)
    shape = shape or draw_shape(rng)
    try:
        with engine(shape, rng) as running:
            return _Scenario(running, shape, rng).play()
    except BaseException as error:
        error.add_note(f"seed {seed}: {shape}")
        raise


class _Scenario:
    def __init__(self, running: Engine, shape: Shape, rng: random.Random) -> None:
        self._engine = running
        self._shape = shape
        self._rng = rng
        self._to_come = shape.requests
        self._steps = 0

    def play(self) -> Played:
        while self._to_come or self._engine.has_work:
            self._happen()
            self._step()
        self._settle()
        loads = sum(worker.device.copied["load"] for worker in self._engine.workers)
        return Played(self._steps, self._engine.world.tokens_checked, loads)

    def _step(self) -> None:
        self._steps += 1
        if self._steps > STEPS_MAX:
            raise NotAtRest(f"after {STEPS_MAX} steps: {self._engine.scheduler.requests}")
        self._engine.step()

    # --- what happens between steps ---

    def _happen(self) -> None:
        rng, shape = self._rng, self._shape
        if self._to_come and rng.random() < 0.4:
            self._add_request()
        if rng.random() < shape.aborts:
            self._abort()
        if rng.random() < shape.forgets:
            self._engine.core.reset_prefix_cache()

    def _add_request(self) -> None:
        rng, shape = self._rng, self._shape
        name = f"r{rng.randrange(shape.names)}"
        if self._engine.knows_request(name):
            return  # an id is used again, but only once vLLM has forgotten who had it
        self._to_come -= 1
        output = rng.randrange(1, shape.output_tokens_max + 1)
        sampling = SamplingParams(max_tokens=output, ignore_eos=True)
        prompt = self._prompt()[: MODEL_TOKENS_MAX - output - 1]
        core = self._engine.core
        core.add_request(
            Request(name, prompt, sampling, None, block_hasher=core.request_block_hasher)
        )

    def _prompt(self) -> list[int]:
        """Draw one that shares a prefix with others."""
        rng = self._rng
        family = random.Random(rng.randrange(self._shape.families))
        length = rng.randrange(1, self._shape.prompt_tokens_max + 1)
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
        if self._rng.random() < 0.5:
            self._engine.core.abort_requests(chosen)
        else:  # while a step runs
            self._engine.core.aborts_queue.put_nowait(chosen)

    # --- the end ---

    def _settle(self) -> None:
        """Step until nobody has anything to do, and check that nothing is left."""
        facade = self._engine.facade
        while facade.has_pending_work() or self._engine.has_work:
            self._step()
        left = _left(facade.statistics())
        if left:
            raise NotAtRest(f"at rest there is {left}")


def _left(now: Any) -> dict[str, Any]:
    """Return what should be zero at rest and is not."""
    primary = now.primary
    told = {
        name: getattr(primary, name)
        for name in (
            "requests",
            "pinned_slots",
            "quarantined_slots",
            "promotion_slots",
            "filling_from_gpu_slots",
            "filling_from_tiers_slots",
        )
    }
    told["slots lost"] = primary.slot_count - primary.free_slots - primary.ready_slots
    told["unknown completions"] = primary.counts.unknown_completions
    told["faults"] = now.faults
    for tier in now.tiers:
        for name in (
            "probes_in_flight",
            "promotion_jobs_in_flight",
            "cascade_jobs_in_flight",
            "promotion_slots",
            "cascade_slots",
        ):
            told[f"{tier.name} {name}"] = getattr(tier, name)
    return {name: value for name, value in told.items() if value}
