"""Notifies peers that request the blocks of a request after it has finished.

vLLM's ``p2p`` tier notifies only a peer that has requested them before. A later peer, requesting a
block that was never kept for it, would wait until its own deadline.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.v1.kv_offload.base import ReqContext
    from vllm.v1.kv_offload.tiering.base import SecondaryTierManager

UNFETCHED_S: Final = 45.0
"""How long a prefill engine keeps blocks that no peer has requested; stores are late at 60 s."""


@dataclass(frozen=True)
class _Ended:
    """A finished request. ``may_be_asked``: whether a peer may still request blocks of it."""

    context: ReqContext
    may_be_asked: Callable[[], bool]
    until: float


class FinishedNotifier:
    """Finished requests whose blocks a peer may still request. Loop thread only."""

    def __init__(self, tier: SecondaryTierManager) -> None:
        self._tier = tier
        self._ended: list[_Ended] = []

    def add(self, context: ReqContext, may_be_asked: Callable[[], bool]) -> None:
        """Add a finished request."""
        until = asyncio.get_running_loop().time() + UNFETCHED_S
        self._ended.append(_Ended(context, may_be_asked, until))

    def tell(self) -> None:
        """Notify the peers that have requested blocks since the last call."""
        now = asyncio.get_running_loop().time()
        asked = self._ended
        self._ended = [each for each in asked if each.may_be_asked() and now < each.until]
        for each in asked:
            self._tier.on_request_finished(each.context)
