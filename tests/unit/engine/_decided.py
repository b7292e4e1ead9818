"""A runtime that knows what its tier takes for a block, and so decides what requests load."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvtier.core.block_state import BlockState
from kvtier.core.messages import TokenPlace
from tests.unit.engine._story import Story, keys_of

if TYPE_CHECKING:
    from kvtier.core.statistics import PrimaryCounts, TierCounts

SPEED = 1000.0  # tokens a second that the engine computes
CHUNK = 10
PLACE = TokenPlace(0, CHUNK)
LENGTH = 24
ABSENT, FILLING, READY = BlockState.ABSENT, BlockState.FILLING, BlockState.READY
PROBING = BlockState.PROBING


class Decided(Story):
    """A runtime whose first tier alone has a prefix, and is known to take ``block_s`` a block."""

    def __init__(self, block_s: float | None, **settings: Any) -> None:
        options = {
            "slots": 128,
            "prefill_tokens_per_s": SPEED,
            "on_reset": "keep",
            **settings,
        }
        super().__init__(**options)
        self.keys = keys_of(LENGTH)
        self.taught = keys_of(80, b"t")
        self.store(self.keys)
        self.store(self.taught)
        self.forget()
        if block_s is not None:
            self.teach(block_s)

    def teach(self, block_s: float, count: int = 8) -> None:
        """Load some other blocks, each in so many seconds."""
        keys, self.taught = self.taught[:count], self.taught[count:]
        self.facade.on_request_started("taught")
        assert self.facade.lookup_states(keys, "taught") == [FILLING] * count
        self.facade.step_end()
        self.runtime.cell.settle()
        self.pass_time(block_s * count)
        self.answer_all()
        self.facade.on_request_finished("taught")
        self.facade.step_end()

    def look_up(self, request: str = "r", *, begins: bool = True) -> list[BlockState]:
        if begins:
            self.facade.on_request_started(request)
        return self.facade.lookup_states(self.keys, request, PLACE)

    def end(self, request: str = "r") -> None:
        self.facade.on_request_finished(request)
        self.facade.step_end()

    def decline(self, seconds: float = 0.0) -> None:
        """Have a request come that declines, after some time."""
        self.now += seconds
        self.facade.step_end()
        assert self.look_up("declines") == [ABSENT]
        self.end("declines")

    @property
    def counts(self) -> PrimaryCounts:
        return self.facade.statistics().primary.counts

    @property
    def tier(self) -> TierCounts:
        return self.facade.statistics().tiers[0].counts
