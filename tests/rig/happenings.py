"""What happens to an engine between its steps: each is drawn, and each is vLLM's own call."""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import Request

from tests.rig.engine import MODEL_TOKENS_MAX
from tests.rig.fake_model import VOCABULARY, Asked

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Set as AbstractSet

    from tests.rig.engine import Engine
    from tests.rig.shape import Shape


ADAPTERS = Path(__file__).with_name("adapters")


def _adapter(number: int) -> LoRARequest:
    """Return one that is told by its files; no worker of the rig loads any."""
    name = f"adapter-{number}"
    return LoRARequest(name, number, str(ADAPTERS / name))


class CompletionCounted(AssertionError):
    """Raised when what was begun before a reset ends what began after it."""


@dataclass(frozen=True)
class _FromBefore:
    """The end of a load or store that was begun before a reset."""

    request: str
    keys: AbstractSet[bytes]
    is_store: bool
    complete: Callable[[], None]


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
        self._from_before: list[_FromBefore] = []
        self._sessions: dict[str, int] = {}  #: request → the tokens it may come to, so far

    @property
    def are_over(self) -> bool:
        """Whether no request is to come any more, and none waits for more of its prompt."""
        return not (self.requests_to_come or self._sessions)

    def happen(self) -> None:
        """Let some things happen, or none."""
        shape, happens = self._shape, self._happens
        arrivals = shape.arrivals if self._engine.has_work else max(0.5, shape.arrivals)
        if self.requests_to_come and happens(arrivals):
            self._add_request()
        if self._sessions and happens(0.3):
            self._go_on_with_a_session()
        if happens(shape.aborts):
            self._abort()
        if happens(shape.forgets):
            self._forget()
        if happens(shape.resets):
            self._reset()
        if happens(shape.updates):
            self._update()
        while self._from_before and (
            self._would_be_taken_for_another() or happens(shape.late_callers)
        ):
            self._complete_from_before()

    def _happens(self, chance: float) -> bool:
        return self._rng.random() < chance

    # --- requests ---

    def _add_request(self) -> None:
        rng, shape = self._rng, self._shape
        name = f"r{rng.randrange(shape.names)}"
        # As vLLM calls the requests that it makes of one that wants several samples.
        names = [f"{number}_{name}" for number in range(rng.randint(1, shape.samples_max))]
        if any(self._engine.knows_request(each) for each in names):
            return  # an id is used again, but only once vLLM has forgotten who had it
        self.requests_to_come -= 1
        output = rng.randrange(1, shape.output_tokens_max + 1)
        sampling = self._sampling(output)
        sampling.extra_args = {"kv_transfer_params": self._transfer_params()}
        salt = rng.choice(["", "salt"]) if shape.salted else ""
        adapter = rng.randint(0, shape.adapters)
        prompt = self._prompt()[: MODEL_TOKENS_MAX - output - 1]
        is_session = self._happens(shape.sessions)
        for number, each in enumerate(names):
            self._engine.world.asked[each] = Asked(salt, adapter, number)
            # A copy: vLLM appends the next part of a session's prompt to it.
            self._start_request(each, [*prompt], sampling, salt, adapter, is_session=is_session)
            self._sessions.pop(each, None)  # of one by this name that was aborted
            if is_session:
                self._sessions[each] = len(prompt) + output

    def _sampling(self, output: int) -> SamplingParams:
        """Draw how a request of at most so many tokens is sampled."""
        shape = self._shape
        return SamplingParams(
            max_tokens=output,
            ignore_eos=True,
            stop_token_ids=[self._rng.randrange(VOCABULARY)] if self._happens(shape.stops) else [],
            skip_reading_prefix_cache=self._happens(shape.skips),
        )

    def _start_request(
        self,
        name: str,
        prompt: list[int],
        sampling: SamplingParams,
        salt: str = "",
        adapter: int = 0,
        *,
        is_session: bool = False,
    ) -> None:
        core, listener = self._engine.core, self._engine.listener
        request = Request(
            name,
            prompt,
            sampling,
            None,
            lora_request=_adapter(adapter) if adapter else None,
            cache_salt=salt or None,
            priority=self._rng.randrange(self._shape.priorities),
            block_hasher=core.request_block_hasher,
            resumable=is_session,
        )
        core.add_request(request)
        if listener is not None:
            listener.meet(request)

    def _go_on_with_a_session(self) -> None:
        """Send a client's next part of a prompt that it streams, or the end of it."""
        rng = self._rng
        name = rng.choice(list(self._sessions))
        if name not in self._engine.scheduler.requests:  # it was aborted
            del self._sessions[name]
            return
        part = [rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 12))]
        output = rng.randrange(1, self._shape.output_tokens_max + 1)
        self._sessions[name] += len(part) + output
        goes_on = self._sessions[name] < MODEL_TOKENS_MAX and self._happens(0.8)
        if not goes_on:
            del self._sessions[name]
        sampling = SamplingParams(max_tokens=output, ignore_eos=True)
        self._start_request(name, part, sampling, is_session=goes_on)

    def _transfer_params(self) -> dict[str, Any] | None:
        """Draw what a client may ask of the connector for one request."""
        rng = self._rng
        if not self._happens(self._shape.asks):
            return None
        return rng.choice(
            [
                {"max_load_tokens": rng.choice([0, 3, 4, 9, 16, 30])},
                # An end within a block that lies behind these tokens fails an assertion of vLLM's.
                {"max_offload_tokens": rng.choice([0, 5, 16])} if self._shape.unit is None else {},
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

    def _forget(self) -> None:
        """Reset vLLM's own cache. What it throws back, it may find in the connector at once."""
        throws_back = self._shape.throws_back and self._engine.may_be_reset
        with suppress(RuntimeError):  # vLLM refuses, once they are thrown back, while any loads
            self._engine.core.reset_prefix_cache(reset_running_requests=throws_back)

    def _reset(self) -> None:
        """Reset the connector as it is, with loads and stores under way."""
        if self._engine.may_be_reset:
            self._keep_completions()
            self._engine.core.reset_prefix_cache(reset_connector=True)

    def _update(self) -> None:
        """Update the weights as one of the RL loops does: pause, reset, replace them, go on."""
        if not self._pause():
            return
        ways = [self._reset_all, self._reset_and_replace, self._call, self._replace, self._go_first]
        if not self._shape.caches:  # else vLLM's own cache would have what is old
            ways.append(self._only_call)
        self._rng.choice(ways)()
        self._engine.scheduler.set_pause_state(PauseState.UNPAUSED)

    def _pause(self) -> bool:
        """Pause, if it is the time. vLLM refuses to reset while a load is under way."""
        scheduler = self._engine.scheduler
        if not self._engine.may_be_reset:
            return False
        if any(request.resumable for request in scheduler.requests.values()):
            return False  # vLLM does not reset what one holds that waits for more of its prompt
        scheduler.set_pause_state(PauseState.PAUSED_NEW)
        while scheduler.kv_holding_waiting or self._engine.is_loading:
            self._step()
        scheduler.set_pause_state(PauseState.PAUSED_ALL)
        while self._engine.computes:
            self._step()
        self._engine.core.model_executor.collective_rpc("synchronize_device")
        return True

    def _reset_all(self) -> None:
        """Reset all caches. The weights stay."""
        self._keep_completions()
        self._reset_gpu(reset_connector=True)

    def _reset_and_replace(self) -> None:
        self._reset_all()
        self._engine.world.weights += 1

    def _call(self) -> None:
        """Call what vLLM has for it, and reset no connector. Version "1" may come again."""
        self._only_call()
        self._reset_gpu()
        if self._happens(0.5):
            self._engine.core.set_weight_version(str(self._rng.randrange(2)))

    def _only_call(self) -> None:
        weights = self._engine.world.weights + 1
        self._engine.core.collective_rpc("update_weights", args=(weights,))

    def _replace(self) -> None:
        """Tell nobody, and reset no connector."""
        self._engine.world.weights += 1
        self._reset_gpu()

    def _go_first(self) -> None:
        """Reset all before the new weights are in: the old ones go on computing meanwhile."""
        self._reset_all()
        self._engine.scheduler.set_pause_state(PauseState.UNPAUSED)
        for _ in range(self._rng.randrange(4)):
            self._step()
        if self._pause():
            self._call()

    def _reset_gpu(self, *, reset_connector: bool = False) -> None:
        done = self._engine.core.reset_prefix_cache(
            reset_running_requests=True, reset_connector=reset_connector
        )
        assert done, "vLLM has not reset all"
        listener = self._engine.listener
        if listener is not None and not reset_connector:
            listener.was_told_to_forget = True

    def _keep_completions(self) -> None:
        """Have what is under way completed after the reset, with the epoch that it began in.

        vLLM's connector drops such completions; another caller of the facade need not.
        """
        if not self._shape.late_callers:  # a chance: how late they are
            return
        facade = self._engine.facade
        epoch = facade.epoch
        for job in self._engine.jobs():
            complete = facade.complete_store if job.is_store else facade.complete_load
            void = partial(complete, sorted(job.keys), job.req_id, epoch=epoch)
            self._from_before.append(_FromBefore(job.req_id, job.keys, job.is_store, void))

    def _would_be_taken_for_another(self) -> bool:
        """Tell whether the next one comes while the same request has the like under way."""
        next_one = self._from_before[0]
        return any(
            job.req_id == next_one.request
            and job.is_store == next_one.is_store
            and job.keys & next_one.keys
            for job in self._engine.jobs()
        )

    def _complete_from_before(self) -> None:
        """Have kvtier ignore a completion, and count it."""
        next_one = self._from_before.pop(0)
        next_one.complete()
        self.void += len(next_one.keys)
        counted = self._engine.facade.statistics().primary.counts.unknown_completions
        if counted != self.void:
            raise CompletionCounted(
                f"{next_one} is from before a reset: {self.void} blocks are to be ignored so far, "
                f"{counted} were"
            )

    def end(self) -> None:
        """Let happen what is still to come."""
        while self._from_before:
            self._complete_from_before()
