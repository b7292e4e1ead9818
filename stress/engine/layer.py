"""The engine layer: a real vLLM server with kvtier in it, and its clients."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, ClassVar

from stress.engine.faults import KINDS
from stress.engine.soak import soak
from stress.layer import Layer

if TYPE_CHECKING:
    from pathlib import Path

    from stress.arguments import Arguments
    from stress.plan import Kind, Plan
    from stress.record import Record


class EngineLayer(Layer):
    """A server whose tiers are harmed and which is restarted, and clients that are impatient."""

    name: ClassVar[str] = "engine"
    kinds: ClassVar[tuple[Kind, ...]] = KINDS

    def __init__(self, arguments: Arguments) -> None:
        self._clients = arguments.clients

    def run(self, plan: Plan, record: Record, folder: Path) -> None:
        """Carry out a plan. Raises ``Failure``."""
        asyncio.run(soak(plan, record, folder, self._clients))


def make_layer(arguments: Arguments) -> EngineLayer:
    """Return the layer."""
    return EngineLayer(arguments)
