"""Figures of the legs of ``kvtier bench tier``: each side beside the client's best."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from kvtier.tools.bench.call_legs import KINDS
from kvtier.tools.bench.percentile import percentile
from kvtier.tools.bench.tier import PLAIN, TIER_SIDES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtier.tools.bench.tier import TierLegs


@dataclass(frozen=True)
class CallFigures:
    """Figures of one side for one kind of calls."""

    kind: str
    side: str
    blocks_a_call: int
    calls_at_once: int
    mb_per_s: Sequence[float]  #: one a round, in 10^6 bytes
    call_p50_ms: float  #: over the calls of all rounds
    call_p99_ms: float
    cpu_s_per_gb: Sequence[float]  #: one a round
    ratios: Sequence[float]  #: MB/s over the best client's, round by round
    is_client: bool
    is_best_client: bool
    share_promised: float

    @property
    def median_mb_per_s(self) -> float:
        """The throughput that is reported."""
        return statistics.median(self.mb_per_s)

    @property
    def median_ratio(self) -> float:
        """The ratio that is reported."""
        return statistics.median(self.ratios)

    @property
    def holds(self) -> bool | None:
        """Whether the promised ratio is met; None if none is promised."""
        return self.median_ratio >= self.share_promised if self.side == PLAIN else None

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        medians = {
            "median_mb_per_s": self.median_mb_per_s,
            "median_cpu_s_per_gb": statistics.median(self.cpu_s_per_gb),
            "median_ratio": self.median_ratio,
        }
        return {**asdict(self), **medians, "holds": self.holds}


def figures(measured: TierLegs) -> list[CallFigures]:
    """Return the figures of all sides, kvtier's before the clients'."""
    return [
        _of_side(measured, kind, side, _best_client(measured, kind))
        for kind in KINDS
        for side in measured.shapes[kind]
    ]


def _of_side(measured: TierLegs, kind: str, side: str, best: str) -> CallFigures:
    legs = [each[kind][side] for each in measured.rounds]
    calls = [seconds * 1e3 for leg in legs for seconds in leg.call_seconds]
    shape = measured.shapes[kind][side]
    throughput = _mb_per_s(measured, kind, side)
    beside = _mb_per_s(measured, kind, best)
    return CallFigures(
        kind=kind,
        side=side,
        blocks_a_call=shape.blocks,
        calls_at_once=shape.at_once,
        mb_per_s=throughput,
        call_p50_ms=percentile(calls, 50),
        call_p99_ms=percentile(calls, 99),
        cpu_s_per_gb=[leg.cpu_seconds / measured.leg_bytes * 1e9 for leg in legs],
        ratios=[own / other for own, other in zip(throughput, beside, strict=True)],
        is_client=side not in TIER_SIDES,
        is_best_client=side == best,
        share_promised=measured.share_promised,
    )


def _best_client(measured: TierLegs, kind: str) -> str:
    """Return the client's side with the best median."""
    clients = [side for side in measured.shapes[kind] if side not in TIER_SIDES]
    return max(clients, key=lambda side: statistics.median(_mb_per_s(measured, kind, side)))


def _mb_per_s(measured: TierLegs, kind: str, side: str) -> list[float]:
    return [measured.leg_bytes / each[kind][side].seconds / 1e6 for each in measured.rounds]
