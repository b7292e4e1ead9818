"""Keeps the state of the engine's requests: one object for each.

It is created on first use: many requests are announced, and then load and store nothing.

KV data computed with several weights belongs to none of them. So a request stores nothing if it
ran while weights or its LoRA adapter were replaced, or if it begins with KV data of older weights
from vLLM's own prefix cache. A request that waits again, without a block on the GPU, may store:
all of it is recomputed.

A request is *undecided* from its first lookup on until it runs, or loads. Its reservations end
with that decision.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtier.vllm.identity.adapters import ADAPTERS
from kvtier.vllm.scheduler.groups import Chains, TokenOrder
from kvtier.vllm.scheduler.prefill_steps import Prompt
from kvtier.vllm.workarounds.resumed import Runs

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from kvtier.vllm.identity.weight_updates import EngineWeights


class RequestState:
    """State of one request, until its end."""

    __slots__ = ("chains", "is_mixed", "name", "order", "prompt", "runs", "was_refused")

    def __init__(self, name: str, chunk_tokens: int | None) -> None:
        """``chunk_tokens``: the tokens that each key covers, if there is one group; else None."""
        self.name = name
        self.is_mixed = False  #: computed with several weights
        self.was_refused = False  #: its prefix had no room in the last step
        self.order = TokenOrder(chunk_tokens)  #: of its keys, as far as it was reported
        self.chains = Chains()  #: the block before each of its blocks
        self.prompt = Prompt()  #: how much of the prompt is computed
        self.runs = Runs()  #: the steps in which it ran, or waited

    def refuse(self, *, is_refused: bool) -> None:
        """Note whether its prefix had no room in this step."""
        self.was_refused = is_refused


class EngineRequests:
    """The requests of one manager. Scheduler thread."""

    def __init__(self, weights: EngineWeights, chunk_tokens: int | None) -> None:
        """``chunk_tokens``: that of ``RequestState``."""
        self._weights = weights
        self._chunk_tokens = chunk_tokens
        self._of: dict[str, RequestState | None] = {}
        self._complete: set[str] = set()  # have their last token
        self._undecided: set[str] = set()

    def __len__(self) -> int:
        """Return the number of requests that vLLM has announced, and not ended."""
        return len(self._of)

    @property
    def running(self) -> int:
        """Number of requests, except undecided ones. One that never looked up a key counts, too."""
        return len(self._of) - len(self._undecided)

    def begin(self, name: str) -> None:
        """Add a request, unless it is there. Weights may have changed while no request was."""
        if not self._of:
            self._weights.on_first_request()
        self._of.setdefault(name)

    def get(self, name: str) -> RequestState | None:
        """Return the state of a request; None: there is none, or the request has ended."""
        return self._of.get(name)

    def of(self, name: str) -> RequestState:
        """Return the state of a request, which begins now if it was not announced."""
        state = self._of.get(name)
        if state is None:
            self.begin(name)
            state = self._of[name] = RequestState(name, self._chunk_tokens)
        return state

    def runs_of(self, names: Iterable[str]) -> list[Runs]:
        """Return the steps in which the requests ran, except those that vLLM has not announced."""
        return [self.of(name).runs for name in names if name in self._of]

    def complete(self, name: str) -> bool:
        """Note that a request has its last token; return whether no other one runs."""
        self._complete |= {name} & self._of.keys()
        return len(self._complete) == len(self._of)

    def end(self, name: str) -> RequestState | None:
        """Forget a request; return its state, if it had one."""
        self._complete.discard(name)
        self._undecided.discard(name)
        ADAPTERS.mixed.discard(name)
        return self._of.pop(name, None)

    def reset(self) -> None:
        """Note that the weights may have changed: nothing is reserved for any request."""
        for state in map(self.of, list(self._of)):
            state.is_mixed = True
            state.was_refused = False
        self._undecided.clear()

    # --- decisions ---

    def wait(self, state: RequestState) -> None:
        """Note that a request is not scheduled for a step."""
        self._undecided.add(state.name)

    def is_undecided(self, name: str) -> bool:
        """Return whether a request has looked up keys, and may wait."""
        return name in self._undecided

    def pop_decided(self, names: Iterable[str]) -> Collection[str]:
        """Return those of the requests that were undecided. They no longer are."""
        decided = self._undecided.intersection(names)
        self._undecided -= decided
        return decided

    # --- permission to load and store ---

    def on_matched(self, name: str, gpu_tokens: int) -> None:
        """Note that a request waits, whether or not keys are looked up for it.

        ``gpu_tokens``: of its hit in vLLM's own prefix cache. It has no other block on the GPU.
        """
        is_mixed = gpu_tokens > 0 and self._weights.gpu_is_stale
        state = self.of(name) if is_mixed else self._of.get(name)
        if state is not None:
            state.is_mixed = is_mixed

    def may_load(self, state: RequestState) -> bool:
        """Return whether stored blocks may be loaded for a request."""
        return state.name not in ADAPTERS.mixed

    def may_store(self, state: RequestState) -> bool:
        """Return whether a request's blocks may be stored."""
        return not state.is_mixed and state.name not in ADAPTERS.mixed
