"""The record of a soak (``python -m stress``): its JSON file, and its bins.

The page's size does not depend on the length of the soak.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence  # noqa: TC003 - msgspec reads annotations
from dataclasses import dataclass
from typing import Final

import msgspec

from kvtier.tools.report.axis import BINS_MAX

SOAK: Final = "kvtier soak"
SAMPLES_EACH_MIN: Final = 2

STATES: Final = ("CLOSED", "HALF_OPEN", "OPEN", "DISABLED")
"""States of a breaker, from best to worst: a bin shows its worst."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample. Counts are of the whole run so far."""

    at_s: float
    requests: int
    blocks_read: int
    blocks_stored: int
    lookups: int  #: of blocks
    hits: int
    resident: Mapping[str, int]  #: tier → resident blocks, by events
    breakers: Mapping[str, str]  #: tier → state
    quarantined: int
    memory_bytes: int = 0  #: resident, of the runtime's process; 0: not measured


@dataclass(frozen=True, slots=True)
class Done:
    """A spell or a single fault, as injected."""

    from_s: float
    to_s: float
    kind: str
    target: str


class Soak(msgspec.Struct):
    """The parts of a record that a page shows."""

    layer: str
    seed: int
    seconds: float
    planned_s: float
    samples: list[Sample]
    spells: list[Done]
    injected: dict[str, int]
    noticed: dict[str, dict[str, int]]
    figures: dict[str, float]
    checks: dict[str, str]
    faults_ended_s: float
    failure: str | None
    injected_total: int
    injected_a_minute: float | None


@dataclass(frozen=True)
class Bins:
    """The series of a page; each has one value a bin, None where nothing was sampled."""

    count: int
    ends_s: float
    blocks_per_s: list[float | None]
    hit_ratio: list[float | None]
    resident: dict[str, list[float | None]]  #: tier → blocks
    quarantined: list[float | None]
    memory_bytes: list[float | None]
    breakers: dict[str, list[str | None]]  #: tier → state
    faults: dict[str, list[int]]  #: kind → number in progress


def bins_of(soak: Soak) -> Bins:
    """Cut a record into bins of equal length."""
    samples = soak.samples
    ends_s = max(soak.seconds, samples[-1].at_s if samples else 0.0, 1e-9)
    count = max(1, min(BINS_MAX, len(samples) // SAMPLES_EACH_MIN))
    filled: list[list[Sample]] = [[] for _ in range(count)]
    for sample in samples:
        filled[_bin(sample.at_s, ends_s, count)].append(sample)
    before = _last_before(filled)
    tiers = list(samples[-1].resident) if samples else []
    return Bins(
        count=count,
        ends_s=ends_s,
        blocks_per_s=[_rate(was, now) for was, now in zip(before, filled, strict=True)],
        hit_ratio=[_ratio(was, now) for was, now in zip(before, filled, strict=True)],
        resident={tier: [_resident(now, tier) for now in filled] for tier in tiers},
        quarantined=[max((each.quarantined for each in now), default=None) for now in filled],
        memory_bytes=[max((each.memory_bytes for each in now), default=None) for now in filled],
        breakers={
            tier: [_worst(now, tier) for now in filled]
            for tier in (samples[-1].breakers if samples else ())
        },
        faults=_faults(soak, ends_s, count),
    )


def _bin(at_s: float, ends_s: float, count: int) -> int:
    return min(count - 1, max(0, int(at_s / ends_s * count)))


def _last_before(filled: Sequence[Sequence[Sample]]) -> list[Sample | None]:
    """Return for each bin the last sample before it."""
    last: Sample | None = None
    found = []
    for now in filled:
        found.append(last)
        last = now[-1] if now else last
    return found


def _rate(was: Sample | None, now: Sequence[Sample]) -> float | None:
    if was is None or not now or now[-1].at_s <= was.at_s:
        return None
    blocks = now[-1].blocks_read + now[-1].blocks_stored - was.blocks_read - was.blocks_stored
    return blocks / (now[-1].at_s - was.at_s)


def _ratio(was: Sample | None, now: Sequence[Sample]) -> float | None:
    if was is None or not now or now[-1].lookups <= was.lookups:
        return None
    return (now[-1].hits - was.hits) / (now[-1].lookups - was.lookups)


def _resident(now: Sequence[Sample], tier: str) -> float | None:
    return now[-1].resident.get(tier) if now else None


def _worst(now: Sequence[Sample], tier: str) -> str | None:
    states = [each.breakers.get(tier, STATES[0]) for each in now]
    return max(states, key=STATES.index, default=None)


def _faults(soak: Soak, ends_s: float, count: int) -> dict[str, list[int]]:
    """Count the faults in progress in each bin, by kind."""
    found: dict[str, Counter[int]] = {}
    for spell in soak.spells:
        first, last = _bin(spell.from_s, ends_s, count), _bin(spell.to_s, ends_s, count)
        found.setdefault(spell.kind, Counter()).update(range(first, last + 1))
    return {kind: [bins[n] for n in range(count)] for kind, bins in sorted(found.items())}
