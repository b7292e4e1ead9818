"""Tracks the requests that vLLM has announced, and which of them may be stored.

KV data computed with several weights belongs to none of them. So a request stores nothing if it
ran while weights or its LoRA adapter were replaced, or if it begins with KV data of older weights
from vLLM's own prefix cache. A request that waits again, without a block on the GPU, may store:
all of it is recomputed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtier.vllm.identity.adapters import ADAPTERS

if TYPE_CHECKING:
    from kvtier.vllm.identity.weight_updates import EngineWeights


class LiveRequests:
    """The live requests of one manager. Scheduler thread."""

    def __init__(self, weights: EngineWeights) -> None:
        self._weights = weights
        self._live: set[str] = set()  # announced, and not finished
        self._mixed: set[str] = set()  # of those, computed with several weights

    def __len__(self) -> int:
        return len(self._live)

    def begin(self, request: str) -> None:
        """Add a request. Weights may have changed while there was none."""
        if not self._live:
            self._weights.on_first_request()
        self._live.add(request)

    def end(self, request: str) -> None:
        """Forget a request."""
        self._live.discard(request)
        self._mixed.discard(request)
        ADAPTERS.mixed.discard(request)

    def wait(self, request: str) -> None:
        """Note that a request is not scheduled for a step: it has no block on the GPU."""
        self._mixed.discard(request)

    def reset(self) -> None:
        """Note that the weights may have changed."""
        self._mixed = self._live.copy()

    def on_gpu_hit(self, request: str) -> None:
        """Note that a request begins with a hit in vLLM's own prefix cache."""
        if self._weights.gpu_is_stale:
            self._mixed.add(request)

    def may_load(self, request: str) -> bool:
        """Return whether stored blocks may be loaded for a request."""
        return request not in ADAPTERS.mixed

    def may_store(self, request: str) -> bool:
        """Return whether a request may be stored."""
        return request not in self._mixed and request not in ADAPTERS.mixed
