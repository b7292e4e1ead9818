"""What went on in a run: samples on a time axis, and the faults that were done.

Two figures of faults: *injected* are the wrongs that were really done, each damaged file, each
failed call, each lying block, each signal; *noticed* are those that kvtier's counters show.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from sys import getsizeof
from typing import TYPE_CHECKING, Any, Final

from kvtier.tools.report.soak import SOAK, Done, Sample

if TYPE_CHECKING:
    from stress.plan import Fault

NOTICED: Final = (
    "load_misses",
    "damaged",
    "failed",
    "stores_rejected",
    "jobs_timed_out",
    "probes_timed_out",
    "breaker_opened",
    "crashes",
)
"""Counters of a tier that tell of faults."""

RATE_FROM_S: Final = 2.0
"""What failed sooner has no rate of faults."""


@dataclass
class Record:
    """Filled while a run goes on; what the verdict, the JSON and the page are made of."""

    layer: str
    seed: int
    seconds: float  #: that it took, phase two included, or until it failed; before, as planned
    planned_s: float = 0.0
    samples: list[Sample] = field(default_factory=list)
    spells: list[Done] = field(default_factory=list)
    injected: Counter[str] = field(default_factory=Counter)  #: kind → how many
    noticed: dict[str, dict[str, int]] = field(default_factory=dict)  #: tier → counter → how many
    figures: dict[str, float] = field(default_factory=dict)  #: what else people want to see
    checks: dict[str, str] = field(default_factory=dict)  #: what was checked at the end → result
    faults_ended_s: float = 0.0
    failure: str | None = None

    def note(self, fault: Fault, from_s: float, to_s: float) -> None:
        """Note a planned fault as done."""
        self.spells.append(Done(from_s, to_s, fault.kind, fault.target))

    @property
    def injected_total(self) -> int:
        """How many faults were injected in all."""
        return sum(self.injected.values())

    def kept_bytes(self) -> int:
        """Return about how much memory the record itself takes: it grows with the run."""
        return sum(map(_size_of, self.samples)) + sum(map(_size_of, self.spells))

    def fail(self, why: str, after_s: float) -> None:
        """Note that a promise was broken: after the last sample, or else ``after_s``."""
        self.failure = why
        self.seconds = self.samples[-1].at_s if self.samples else after_s

    @property
    def injected_a_minute(self) -> float | None:
        """How many faults a minute of those that faults lasted; None: too short to tell."""
        lasted_s = self.faults_ended_s or self.seconds
        if self.failure is not None:
            lasted_s = min(lasted_s, self.seconds)
        return self.injected_total / lasted_s * 60 if lasted_s >= RATE_FROM_S else None

    def as_json(self) -> dict[str, Any]:
        """Return all of it as plain values."""
        return {
            "report": SOAK,
            **asdict(self),
            "injected": dict(self.injected),
            "injected_total": self.injected_total,
            "injected_a_minute": self.injected_a_minute,
        }


def _size_of(entry: Sample | Done) -> int:
    """Return the bytes of an entry, what its mappings hold included."""
    values = [getattr(entry, each.name) for each in fields(entry)]
    held = [value for each in values if isinstance(each, Mapping) for value in each.values()]
    return sum(map(getsizeof, (entry, *values, *held)))
