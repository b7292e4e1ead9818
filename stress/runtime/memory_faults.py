"""Faults of the ``memory`` tier: slow, hung, raising, lying, answering too little, full."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from stress.plan import Kind
from stress.runtime.backends import CountedFaults, SoakedMemory

if TYPE_CHECKING:
    from collections import Counter

    from stress.plan import Fault

OPERATIONS: Final = ("probe", "load", "store", "remove")
_SPELL_S: Final = (0.02, 0.6)

KINDS: Final = (
    Kind("slow", OPERATIONS, per_minute=30, spell_s=_SPELL_S),
    Kind("hang", OPERATIONS, per_minute=15, spell_s=_SPELL_S),
    Kind("raise", OPERATIONS, per_minute=30, spell_s=_SPELL_S),
    Kind("fail_some", OPERATIONS, per_minute=60, spell_s=_SPELL_S),
    Kind("lie", ("load",), per_minute=120, spell_s=_SPELL_S),
    Kind("answer_too_little", OPERATIONS[:3], per_minute=30, spell_s=_SPELL_S),
    Kind("full", ("store",), per_minute=30, spell_s=_SPELL_S),
)


class MemoryFaults:
    """Does them, and takes them back: the last one of an operation holds."""

    def __init__(self, injected: Counter[str]) -> None:
        self._injected = injected

    def begin(self, fault: Fault) -> int:
        """Do a fault. What it does is counted where it is done."""
        backend = SoakedMemory.latest()
        if fault.kind == "hang":
            backend.hung = self._injected
            backend.hanging.add(fault.target)
        else:
            setattr(backend.faults, fault.target, self._faults(fault))
        return 0

    def end(self, fault: Fault) -> None:
        """Take a fault back."""
        backend = SoakedMemory.latest()
        if fault.kind == "hang":
            backend.hanging.discard(fault.target)
        else:
            setattr(backend.faults, fault.target, CountedFaults())

    def _faults(self, fault: Fault) -> CountedFaults:
        dice, kind = fault.dice, fault.kind
        return CountedFaults(
            kind=kind,
            injected=self._injected,
            delay_s=dice.uniform(0.0, 0.5) if kind == "slow" else 0.0,
            error="on fire" if kind == "raise" else None,
            fail_every=dice.randrange(2, 6) if kind == "fail_some" else 0,
            corrupt_every=dice.randrange(1, 4) if kind == "lie" else 0,
            answers_missing=1 if kind == "answer_too_little" else 0,
            full=kind == "full",
        )
