"""The plan of a run: faults on a time axis, all drawn from one seed.

What a fault does in detail is drawn from its own ``dice``, so leaving a kind out with
``--faults`` changes nothing about the others.

The gate's plan comes in rounds. The first has each kind, as often as it comes by itself, and once
at least; what a round has not shown comes again in the next (``stress.pace``).
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

ROUND_S: Final = 10.0
AGAIN_S: Final = 0.5  #: the same of a round after the first
ROUND_SPELL_S_MAX: Final = 5.0


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
    gate: tuple[Kind, ...] | None = None  #: the kinds, if counts end the run, and not the clock

    @property
    def is_gate(self) -> bool:
        """Whether this is the first round of a plan that goes on until counts are reached."""
        return self.gate is not None


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


def draw_gate_plan(seed: int, kinds: Iterable[Kind]) -> Plan:
    """Draw the first round of a plan that goes on until counts are reached."""
    known = tuple(kinds)
    return Plan(seed, ROUND_S, draw_round(seed, 0, known), gate=known)


def draw_round(seed: int, number: int, kinds: Iterable[Kind]) -> tuple[Fault, ...]:
    """Draw a round, in the order of its beginnings: each kind comes once at least."""
    seconds = AGAIN_S if number else ROUND_S
    faults = [fault for kind in kinds for fault in _draw_some(seed, number, seconds, kind)]
    return tuple(sorted(faults, key=lambda fault: (fault.at_s, fault.seed)))


def _draw_some(seed: int, number: int, seconds: float, kind: Kind) -> Sequence[Fault]:
    dice = random.Random(f"{seed}:{kind.name}:round {number}")
    faults: list[Fault] = []
    for _ in range(max(1, round(kind.per_minute * seconds / 60))):
        own = f"{seed}:{kind.name}:{number}.{len(faults)}"
        at_s = dice.uniform(0.0, seconds)
        for_s = min(dice.uniform(*kind.spell_s), ROUND_SPELL_S_MAX)
        target = dice.choice(kind.targets)
        faults.append(Fault(at_s, for_s, kind.name, target, own, random.Random(own)))
    return faults
