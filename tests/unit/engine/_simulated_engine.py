"""An engine and a tier in simulated time, whose requests' times to first token can be compared.

The engine schedules as vLLM's does: running prompts first, in chunks of a budget, then those that
wait, in order of arrival; a prompt that takes the whole budget lets those behind it wait for the
next step. The tier has one device that moves a block after the other. All of kvtier between them
is real, and runs on the clock of the simulation, so the same prompts take the same time again.
"""

from __future__ import annotations

from itertools import takewhile
from typing import TYPE_CHECKING, Final, NamedTuple

from kvtier.core.block_state import BlockState
from kvtier.core.messages import TokenPlace
from kvtier.plugin_api.backend import BackendTraits, Outcome
from kvtier.tier import driver_messages as d
from tests.unit.engine._story import Story

if TYPE_CHECKING:
    from collections.abc import Sequence

CHUNK_TOKENS: Final = 32
BUDGET_TOKENS: Final = 2048
TAIL_TOKENS: Final = 7  #: at a prompt's end, which no block has
STEP_S: Final = 0.002  #: what each step takes beside its tokens
TOKEN_S: Final = 1e-4
ATTENTION_S: Final = (
    2e-9  #: for each of ``n² + 2 n c``: see ``kvtier/engine/decide/prefill_speed.py``
)
IDLE_S: Final = 0.004  #: between two looks of an engine that has nothing to compute
GPU_BLOCK_S: Final = 1e-5  #: from host memory to the GPU
HANGS: Final = float("inf")

COMPUTE_BLOCK_S: Final = TOKEN_S * CHUNK_TOKENS
"""About what computing a block takes, in a short prompt."""


class Prompt(NamedTuple):
    """What a request asks for."""

    keys: tuple[bytes, ...]
    tokens: int

    @classmethod
    def of(cls, number: int, tokens: int) -> Prompt:
        """Return one of so many tokens; another number, another prompt."""
        name = f"{number} of {tokens}, ".encode()
        count = tokens // CHUNK_TOKENS
        keys = tuple(name + str(place).encode() + bytes(4) for place in range(count))
        return cls(keys, count * CHUNK_TOKENS + TAIL_TOKENS)


class _Request:
    """One that has no first token yet."""

    def __init__(self, name: str, prompt: Prompt, arrived: float) -> None:
        self.name = name
        self.prompt = prompt
        self.arrived = arrived
        self.first_token = 0.0
        self.computed = 0  # tokens
        self.loads: tuple[bytes, ...] = ()  # from host memory
        self.loaded_at: float | None = None


class SimulatedEngine:
    """``policy``: the ``load_policy``, or ``"recompute"`` for an engine without tiers."""

    def __init__(self, policy: str, block_s: float, *, slots: int = 4096) -> None:
        """``block_s``: what the tier takes for a block; it may be changed, ``HANGS`` included."""
        self.block_s = block_s
        self._recomputes = policy == "recompute"
        self._story = Story(
            slots=slots,
            load_policy="always" if self._recomputes else policy,
            on_reset="keep",
            backend_traits=BackendTraits(4, 4),
        )
        self._facade = self._story.facade
        self._stored: set[bytes] = set()
        self._device_free_at = 0.0
        self._due: dict[int, float] = {}  # batches: when their loads end
        self._waiting: list[_Request] = []
        self._running: list[_Request] = []
        self._count = 0
        self._computed = (0, 0)  # in the step before: tokens, attention
        self._step_began: float | None = None  # None: there was nothing to compute

    def store(self, prompt: Prompt) -> None:
        """Compute a prompt, and leave its blocks to the tier."""
        self.serve([prompt])
        self._stored.update(prompt.keys)
        self._story.store(list(prompt.keys), prompt.keys[0].decode(errors="replace"))
        self.forget()

    def forget(self) -> None:
        """Empty host memory, once the tier has moved what it was asked for."""
        while self._due and min(self._due.values()) < HANGS:
            self._pass_time(IDLE_S)
            self._end_step()
        self._story.forget()
        self._end_step()

    def serve(self, prompts: Sequence[Prompt]) -> list[float]:
        """Ask for prompts, all at once; return the time to the first token of each, in seconds."""
        requests = []
        for prompt in prompts:
            self._count += 1
            request = _Request(f"r{self._count}", prompt, self._story.now)
            self._facade.on_request_started(request.name)
            requests.append(request)
        self._waiting += requests
        while self._waiting or self._running:
            self._step()
        self._step()  # that decodes, so it is seen how long the last one took
        self._step_began = None
        return [request.first_token - request.arrived for request in requests]

    # --- the engine ---

    def _step(self) -> None:
        self._poll()
        computing = self._schedule()
        self._tell_computed()
        self._end_step()
        self._compute(computing)

    def _schedule(self) -> list[tuple[_Request, int]]:
        """Return what is computed in this step: how many tokens of each request."""
        room = BUDGET_TOKENS
        computing: list[tuple[_Request, int]] = []
        for request in (*self._running, *self._waiting):
            if not room:
                break
            if request in self._waiting:
                if not self._is_ready(request):
                    continue
                self._waiting.remove(request)
                self._running.append(request)
            count = min(room, request.prompt.tokens - request.computed)
            room -= count
            computing.append((request, count))
        return computing

    def _is_ready(self, request: _Request) -> bool:
        """Tell whether a request that waits can be computed now."""
        facade, name, keys = self._facade, request.name, request.prompt.keys
        if request.loaded_at is not None:
            if request.loaded_at > self._story.now:
                return False
            facade.complete_load(request.loads, name)
            request.computed = len(request.loads) * CHUNK_TOKENS
            return True
        if self._recomputes:
            return True
        place = TokenPlace(0, CHUNK_TOKENS) if facade.decides_loads else None
        states = facade.lookup_states(keys, name, place)
        while BlockState.ABSENT not in states[-1:] and len(states) < len(keys):
            states.append(facade.lookup_state(keys[len(states)], name))  # with room made for it
            states += facade.lookup_states(keys[len(states) :], name)
        found = list(takewhile(lambda state: state is not BlockState.ABSENT, states))
        if any(state is not BlockState.READY for state in found):
            return False
        if found:
            request.loads = keys[: len(found)]
            request.loaded_at = self._story.now + GPU_BLOCK_S * len(found)
            facade.prepare_load(request.loads, name)
        facade.on_requests_scheduled([name])
        return not found

    def _tell_computed(self) -> None:
        began, now = self._step_began, self._story.now
        self._facade.on_step_computed(*self._computed, None if began is None else now - began)

    def _compute(self, computing: Sequence[tuple[_Request, int]]) -> None:
        self._step_began = self._story.now if computing else None
        tokens = attention = 0
        busy_s = STEP_S
        for request, count in computing:
            before, end = request.computed, request.computed + count
            busy_s += TOKEN_S * count + ATTENTION_S * (end * end - before * before)
            request.computed = end
            before, end = (each // CHUNK_TOKENS * CHUNK_TOKENS for each in (before, end))
            tokens += end - before  # all that vLLM shows: whole chunks
            attention += end * end - before * before
        self._computed = (tokens, attention)
        self._pass_time(busy_s if computing else IDLE_S)
        for request, _ in computing:
            if request.computed == request.prompt.tokens:
                request.first_token = self._story.now
                self._running.remove(request)
                self._facade.on_request_finished(request.name)

    def _end_step(self) -> None:
        self._facade.step_end()
        self._poll()

    def _poll(self) -> None:
        """Have the engine and the tier take in what they sent each other."""
        self._story.runtime.cell.settle()
        self._work()

    # --- the tier ---

    def _pass_time(self, seconds: float) -> None:
        until = self._story.now + seconds
        while self._due and (first := min(self._due.values())) <= until:
            self._story.now = max(self._story.now, first)
            self._work()
        self._story.now = until

    def _work(self) -> None:
        """Have the tier begin and end what it can now. What it tells waits for the engine."""
        tier = self._story.runtime.tiers[0]
        is_busy = True
        while is_busy:
            is_busy = False
            for mailbox in tier.mailboxes:
                while mailbox.waiting:
                    self._story.runtime.cell.deliver(mailbox)
            for batch in list(tier.batches):
                if not isinstance(batch, d.LoadBatch) or self._has_moved(batch):
                    has = [key in self._stored or not _asks(batch) for key in batch.keys]
                    outcomes = [Outcome.DONE if each else Outcome.ABSENT for each in has]
                    tier.answer(batch, outcomes, at=self._story.now)
                    is_busy = True

    def _has_moved(self, batch: d.LoadBatch) -> bool:
        """Tell whether the device is done with a load, which it begins if it has not."""
        due = self._due.get(batch.batch)
        if due is None:
            begins = max(self._story.now, self._device_free_at)
            due = self._due[batch.batch] = begins + len(batch.keys) * self.block_s
            self._device_free_at = due if due < HANGS else self._device_free_at
        if due > self._story.now:
            return False
        del self._due[batch.batch]
        return True


def _asks(batch: object) -> bool:
    return isinstance(batch, d.ProbeBatch)
