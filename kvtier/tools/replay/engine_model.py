"""The engine that a replay simulates: stated speeds instead of a model.

One prompt is computed at a time, at a stated speed; the outputs of all requests in flight are
computed beside it, each at its own speed. A request
enters when fewer than ``requests_in_flight_max`` are in flight, first come,
first served. The engine keeps no earlier prompts: blocks that no tier has are recomputed.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtier.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvtier.tools.replay.traces import TraceEvent, TraceRequest


@dataclass(frozen=True)
class EngineModel:
    """The stated speeds, and ``speed``: the factor by which all of it is played faster."""

    prefill_tokens_per_s: float = 100_000.0
    decode_tokens_per_s: float = 50.0  #: of each request
    requests_in_flight_max: int = 128
    speed: float = 1.0

    def __post_init__(self) -> None:
        """Refuse values that are not above 0."""
        for name, value in vars(self).items():
            if not value > 0:
                raise ConfigError(f"{name}={value!r} must be above 0.")

    def arrival_s(self, request: TraceRequest) -> float:
        """When the request arrives, on the replay's clock."""
        return request.time_s / self.speed

    def event_s(self, event: TraceEvent) -> float:
        """When an event of a record happens, on the replay's clock."""
        return event.time_s / self.speed

    def prefill_s(self, tokens: int) -> float:
        """Time to compute a number of prompt tokens; one is always computed."""
        return max(1, tokens) / self.prefill_tokens_per_s / self.speed

    def end_s(self, request: TraceRequest, first_token_s: float) -> float:
        """When all output tokens are computed: as recorded, or in the stated time."""
        if request.ended_s is not None:
            return max(first_token_s, request.ended_s / self.speed)
        return first_token_s + request.output_tokens / self.decode_tokens_per_s / self.speed

    def first_tokens_without_offloading(self, requests: Iterable[TraceRequest]) -> list[float]:
        """Return each request's time to first token if every prompt is computed in full."""
        computed_until = 0.0
        ends: list[float] = []
        times = []
        for request in requests:
            arrival = self.arrival_s(request)
            enters = arrival
            if len(ends) >= self.requests_in_flight_max:
                enters = max(arrival, heapq.heappop(ends))
            computed_until = max(enters, computed_until) + self.prefill_s(request.input_tokens)
            heapq.heappush(ends, self.end_s(request, computed_until))
            times.append(computed_until - arrival)
        return times
