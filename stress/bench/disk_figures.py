"""What legs say: medians, percentiles, and the ratios that are held against a bar."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kvtier.tools.bench.percentile import percentile
from stress.bench.disk import KINDS, LOAD, STORE
from stress.bench.disk_fio import FIO
from stress.bench.disk_lmcache import LMCACHE
from stress.bench.disk_raw import RAW
from stress.bench.disk_sides import ENCRYPTED, KVTIER_FS
from stress.bench.sides import KVTIER, VLLM

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stress.bench.disk import DiskMeasured, Legs, Round

BESIDE_VLLM_MIN: Final = {
    (64 << 10, STORE): 4.0,
    (64 << 10, LOAD): 1.2,
    (1 << 20, STORE): 1.5,
    (1 << 20, LOAD): 1.0,
}
"""How many times vLLM's GB/s is promised, by block size and kind."""

BESIDE_FIO_MIN: Final = 0.85
LARGE_BYTES: Final = 1 << 20  #: blocks of the models that people serve have this size and more
FS_BESIDE_VLLM_MIN: Final = 1.0  #: of large blocks
OF_BEST_MIN: Final = 0.95  #: of large blocks
PAUSE_BESIDE_VLLM_MAX: Final = 0.25
RIVALS: Final = {VLLM: "vLLM's", LMCACHE: "LMCache's", RAW: "raw's"}


@dataclass(frozen=True)
class Ratio:
    """One side's figure over another's, round by round, and what is promised of the median."""

    name: str
    of_rounds: Sequence[float]
    at_least: float | None = None
    at_most: float | None = None

    @property
    def median(self) -> float:
        """The ratio that is reported."""
        return statistics.median(self.of_rounds)

    @property
    def holds(self) -> bool | None:
        """Whether the promise is kept; None where there is none."""
        if self.at_least is not None:
            return self.median >= self.at_least
        return None if self.at_most is None else self.median <= self.at_most

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        return {
            "name": self.name,
            "median": self.median,
            "of_rounds": list(self.of_rounds),
            "at_least": self.at_least,
            "at_most": self.at_most,
            "holds": self.holds,
        }


def gb_per_s(measured: DiskMeasured, kind: str, side: str, *, busy: bool) -> list[float]:
    """Return what each round's leg moved in a second, in GB (10^9 bytes)."""
    legs = [_legs(each, busy=busy)[kind][side] for each in measured.rounds]
    return [measured.leg_bytes / leg.seconds / 1e9 for leg in legs]


def job_ms(measured: DiskMeasured, kind: str, side: str, percent: float) -> float | None:
    """Return a percentile over all jobs of all rounds, the thread idle. None: it has no jobs."""
    seconds = [s for each in measured.rounds for s in each.idle[kind][side].job_seconds]
    return percentile(seconds, percent) * 1e3 if seconds else None


def cpu_s_per_gb(measured: DiskMeasured, kind: str, side: str) -> list[float] | None:
    """Return how long each round's leg has kept cores busy, for each GB. None: not known."""
    if side == FIO:
        return None
    legs = [each.idle[kind][side] for each in measured.rounds]
    return [leg.cpu_seconds / measured.leg_bytes * 1e9 for leg in legs]


def pauses_ms(measured: DiskMeasured, kind: str, side: str) -> list[float]:
    """Return each round's longest pause of the busy thread."""
    return [each.busy[kind][side].longest_pause_s * 1e3 for each in measured.rounds]


def ratios(measured: DiskMeasured) -> list[Ratio]:
    """Return all that is promised of a block size, and what belongs beside it."""
    has_fio = FIO in measured.sides
    found = []
    for kind in KINDS:
        bar = BESIDE_VLLM_MIN.get((measured.block_bytes, kind))
        found += [
            Ratio(f"{kind}, times vLLM's GB/s", _times_faster(measured, kind, VLLM), bar),
            Ratio(
                f"{kind}, thread busy, times vLLM's GB/s",
                _times_faster(measured, kind, VLLM, busy=True),
            ),
            Ratio(
                f"{kind}, share of raw's GB/s",
                _times_faster(measured, kind, RAW),
                None if has_fio else BESIDE_FIO_MIN,
            ),
        ]
        if has_fio:
            found.append(
                Ratio(
                    f"{kind}, share of fio's GB/s",
                    _times_faster(measured, kind, FIO),
                    BESIDE_FIO_MIN,
                )
            )
        if ENCRYPTED in measured.sides:
            found.append(
                Ratio(
                    f"{kind}, encrypted, share of kvtier's own GB/s",
                    _times_faster(measured, kind, KVTIER, side=ENCRYPTED),
                )
            )
        found.append(
            Ratio(
                f"{kind}, kvtier fs, times vLLM's GB/s",
                _times_faster(measured, kind, VLLM, side=KVTIER_FS),
                FS_BESIDE_VLLM_MIN if measured.block_bytes >= LARGE_BYTES else None,
            )
        )
        if LMCACHE in measured.sides:
            found.append(
                Ratio(
                    f"{kind}, times LMCache's GB/s",
                    _times_faster(measured, kind, LMCACHE),
                )
            )
        if measured.block_bytes >= LARGE_BYTES:
            others = [side for side in RIVALS if side in measured.sides]
            found.append(
                Ratio(
                    f"{kind}, share of the best of {' and '.join(RIVALS[o] for o in others)} GB/s",
                    _of_best(measured, kind, others),
                    OF_BEST_MIN,
                )
            )
    return found + [_pause(measured, kind) for kind in KINDS]


def _times_faster(
    measured: DiskMeasured, kind: str, other: str, *, side: str = KVTIER, busy: bool = False
) -> list[float]:
    """Return how many times as fast as ``other`` a side was in each round: all move as much."""
    legs = [_legs(each, busy=busy)[kind] for each in measured.rounds]
    return [leg[other].seconds / leg[side].seconds for leg in legs]


def _of_best(measured: DiskMeasured, kind: str, others: Sequence[str]) -> list[float]:
    """Return how many times as fast as the fastest of the others kvtier was in each round."""
    legs = [each.idle[kind] for each in measured.rounds]
    return [min(leg[other].seconds for other in others) / leg[KVTIER].seconds for leg in legs]


def _pause(measured: DiskMeasured, kind: str) -> Ratio:
    legs = [each.busy[kind] for each in measured.rounds]
    shares = [leg[KVTIER].longest_pause_s / leg[VLLM].longest_pause_s for leg in legs]
    return Ratio(f"{kind}, longest pause, share of vLLM's", shares, at_most=PAUSE_BESIDE_VLLM_MAX)


def _legs(each: Round, *, busy: bool) -> dict[str, Legs]:
    return each.busy if busy else each.idle
