"""The plan of a run: faults on a time axis, all drawn from one seed.

What a fault does in detail is drawn from its own ``dice``, so leaving a kind out with
``--faults`` changes nothing about the others.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


@dataclass(frozen=True)
class Kind:
    """One kind of fault that a layer knows how to inject."""

    name: str
    targets: tuple[str, ...]  #: what it may be done to: tiers, mostly
    per_minute: float  #: how many a minute, of all targets together
    spell_s: tuple[float, float] = (0.0, 0.0)  #: how long it lasts, from and to; 0: done once


@dataclass(frozen=True)
class Fault:
    """One fault of a plan."""

    at_s: float  #: seconds from the start
    for_s: float  #: 0: done once
    kind: str
    target: str
    seed: str
    dice: random.Random = field(compare=False, repr=False)

    @property
    def name(self) -> str:
        """Return it in two words, for people."""
        return f"{self.kind} {self.target}"


@dataclass(frozen=True)
class Plan:
    """All faults of a run, in the order of their beginnings."""

    seed: int
    seconds: float
    faults: tuple[Fault, ...]


def draw_plan(seed: int, seconds: float, kinds: Iterable[Kind]) -> Plan:
    """Draw a plan. The same seed and kinds give the same plan, and a longer run begins alike."""
    faults = [fault for kind in kinds for fault in _draw_kind(seed, seconds, kind)]
    return Plan(seed, seconds, tuple(sorted(faults, key=lambda fault: (fault.at_s, fault.seed))))


def _draw_kind(seed: int, seconds: float, kind: Kind) -> Sequence[Fault]:
    dice = random.Random(f"{seed}:{kind.name}")
    faults: list[Fault] = []
    at_s = dice.expovariate(kind.per_minute / 60)
    while at_s < seconds:
        own = f"{seed}:{kind.name}:{len(faults)}"
        for_s = dice.uniform(*kind.spell_s)
        target = dice.choice(kind.targets)
        faults.append(Fault(at_s, for_s, kind.name, target, own, random.Random(own)))
        at_s += dice.expovariate(kind.per_minute / 60)
    return faults
