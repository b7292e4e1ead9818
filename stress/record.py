"""What went on in a run: samples on a time axis, and the faults that were done.

Two figures of faults: *injected* are the wrongs that were really done, each damaged file, each
failed call, each lying block, each signal; *noticed* are those that kvtier's counters show.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from stress.plan import Fault

NOTICED: Final = (
    "absent",
    "damaged",
    "failed",
    "full",
    "jobs_timed_out",
    "probes_timed_out",
    "breaker_opened",
    "broke",
)
"""Counters of a tier that tell of faults."""


@dataclass(frozen=True)
class Sample:
    """One moment. Counts are of the whole run so far."""

    at_s: float
    requests: int
    blocks_read: int
    blocks_stored: int
    lookups: int  #: of blocks
    hits: int
    resident: Mapping[str, int]  #: tier → blocks that events say are there
    breakers: Mapping[str, str]  #: tier → state
    quarantined: int


@dataclass(frozen=True)
class Done:
    """A spell or a single fault, as it was done."""

    from_s: float
    to_s: float
    kind: str
    target: str


@dataclass
class Record:
    """Filled while a run goes on; what the verdict, the JSON and the page are made of."""

    layer: str
    seed: int
    seconds: float  #: that it took, phase two included; before that, what was planned
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

    def as_json(self) -> dict[str, Any]:
        """Return all of it as plain values."""
        return {
            **asdict(self),
            "injected": dict(self.injected),
            "injected_total": self.injected_total,
        }
