"""The engine layer: a real vLLM server with kvtier in it, and its clients."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, ClassVar, Final

from stress.engine.faults import ALONE_KINDS, KINDS
from stress.engine.soak import soak
from stress.layer import Layer

if TYPE_CHECKING:
    from pathlib import Path

    from stress.arguments import Arguments
    from stress.plan import Kind, Plan
    from stress.record import Record

CLIENTS: Final = 64
GATE_CLIENTS: Final = 12


class EngineLayer(Layer):
    """A server whose tiers are harmed and which is restarted, and clients that are impatient."""

    name: ClassVar[str] = "engine"
    kinds: ClassVar[tuple[Kind, ...]] = KINDS
    not_in_the_gate: ClassVar[frozenset[str]] = frozenset(kind.name for kind in ALONE_KINDS)

    def __init__(self, arguments: Arguments) -> None:
        usual = GATE_CLIENTS if arguments.gate else CLIENTS
        self._clients = arguments.clients or usual

    def run(self, plan: Plan, record: Record, folder: Path) -> None:
        """Carry out a plan. Raises ``Failure``."""
        asyncio.run(soak(plan, record, folder, self._clients))


def make_layer(arguments: Arguments) -> EngineLayer:
    """Return the layer."""
    return EngineLayer(arguments)
