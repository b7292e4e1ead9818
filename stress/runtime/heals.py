"""Sees that a tier serves again soon after a fault of it has ended. By the clock only."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from stress.failure import Failure

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from stress.plan import Fault
    from stress.record import Record


class _Wait(NamedTuple):
    """For a tier's first block since a fault has ended."""

    kind: str
    since_s: float
    served: int  #: until then


class Heals:
    """Of one run. Each tier is waited for until it serves, or another fault keeps it from that."""

    def __init__(
        self, limits_s: Mapping[str, float], passed_over: frozenset[str], tiers: Sequence[str]
    ) -> None:
        """``limits_s``: by kind; ``passed_over``: kinds that keep no tier from serving."""
        self._limits_s = limits_s
        self._passed_over = passed_over
        self._number_of = {tier: number for number, tier in enumerate(tiers)}
        self._waits: dict[str, _Wait] = {}
        self._slowest: dict[str, float] = {}  # by kind
        self._seen = 0

    def begins(self, fault: Fault) -> None:
        """Note that a fault begins."""
        if fault.target not in self._number_of:
            self._waits.clear()  # the engine itself ends, say
        elif fault.kind not in self._passed_over:
            self._waits.pop(fault.target, None)

    def ended(self, fault: Fault, now_s: float, served_by: Mapping[int, int]) -> None:
        """Note that a fault has ended, or was done at once."""
        number = self._number_of.get(fault.target)
        if number is not None and fault.kind in self._limits_s:
            self._waits[fault.target] = _Wait(fault.kind, now_s, served_by.get(number, 0))

    def look(self, now_s: float, served_by: Mapping[int, int]) -> None:
        """See who serves again. Raises ``Failure`` for a tier that took too long."""
        for tier, (kind, since_s, served) in list(self._waits.items()):
            took_s = now_s - since_s
            if served_by.get(self._number_of[tier], 0) > served:
                del self._waits[tier]
                self._seen += 1
                self._slowest[kind] = max(took_s, self._slowest.get(kind, 0.0))
            elif took_s > self._limits_s[kind]:
                raise Failure(f"{tier} has served nothing for {took_s:.1f} s since {kind} ended")

    def note(self, record: Record) -> None:
        """Note how long it took."""
        slowest = ", ".join(f"{kind} {took_s:.1f} s" for kind, took_s in self._slowest.items())
        record.checks["tiers that served again after a fault"] = f"{self._seen}; slowest: {slowest}"
