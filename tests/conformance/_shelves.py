"""A bounded backend whose blocks outlive it, as a third party may write one."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

from kvtier.testing import _workbench
from kvtier_backends.memory import MemoryBackend

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from kvtier.plugin_api.backend import BackendContext

CAPACITY_BYTES = 64 * _workbench.BLOCK_BYTES
SHELVES: dict[str, Any] = {}


class Outlives(MemoryBackend):
    """What a third party may write: bounded, and it persists. A shelf for each namespace."""

    def __init__(self, context: BackendContext, *rest: Any) -> None:
        super().__init__(context, *rest)
        self.before: list[bytes] = []
        self.shelf = f"{context.block_bytes} {context.namespace.facts}"
        self.is_reader = False

    @classmethod
    def from_options(cls, options: Mapping[str, Any], context: BackendContext) -> Self:
        """Take readers, too, which memory that is empty at each start has no use for."""
        made = super().from_options(options, replace(context, read_only=False))
        made.is_reader = context.read_only
        return made

    @property
    def place(self) -> str | None:
        return self.shelf

    async def open(self) -> None:
        self._kept = SHELVES.setdefault(self.shelf, {})
        self.before = list(self._kept)

    def contents(self) -> Iterable[Sequence[bytes]]:
        for start in range(0, len(self.before), 8):
            yield self.before[start : start + 8]

    async def close(self) -> None:
        pass
