"""What a plan's faults are done to: the one interface of all layers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, Protocol

if TYPE_CHECKING:
    from pathlib import Path

    from stress.arguments import Arguments
    from stress.plan import Fault, Kind, Plan
    from stress.record import Record


class Injector(Protocol):
    """Does some kinds of faults. One thread."""

    def begin(self, fault: Fault) -> int:
        """Do a fault; returns how many wrongs that was, without those counted as they come."""

    def end(self, fault: Fault) -> None:
        """Take a fault back that lasts."""


class Layer(ABC):
    """One layer. Its ``run`` does both phases: faults, and what must be so after them."""

    name: ClassVar[str]
    kinds: ClassVar[tuple[Kind, ...]]  #: the faults that it knows
    not_in_the_gate: ClassVar[frozenset[str]] = frozenset()  #: kinds that take minutes

    def __init__(self, arguments: Arguments) -> None:
        """Make it for what was asked."""
        del arguments

    @abstractmethod
    def run(self, plan: Plan, record: Record, folder: Path) -> None:
        """Carry out a plan in an empty folder, and fill the record.

        Raises ``Failure`` when a promise was broken. Whatever happens, nothing that it
        started is left.
        """
