"""The engine layer: a real vLLM server with kvtier in it, and its clients."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, ClassVar

from stress.engine.soak import run
from stress.layer import Layer

if TYPE_CHECKING:
    from pathlib import Path

    from stress.arguments import Arguments
    from stress.plan import Kind, Plan
    from stress.record import Record


class EngineLayer(Layer):
    """A server, and clients that are impatient. The plan has no faults for it yet."""

    name: ClassVar[str] = "engine"
    kinds: ClassVar[tuple[Kind, ...]] = ()

    def __init__(self, arguments: Arguments) -> None:
        self._arguments = arguments

    def run(self, plan: Plan, record: Record, folder: Path) -> None:
        """Run the clients for as long as the plan lasts. Raises ``Failure``."""
        record.faults_ended_s = plan.seconds
        for number, line in enumerate(asyncio.run(run(folder, self._arguments)), start=1):
            record.checks[f"line {number}"] = line


def make_layer(arguments: Arguments) -> EngineLayer:
    """Return the layer."""
    return EngineLayer(arguments)
