"""Injected faults: the failures that a test or a soak run wants from a memory tier.

A ``FaultScript`` has one ``OperationFaults`` for each operation. In the
configuration it is a mapping with the same names, keys in hex:

    {"type": "memory", "capacity_bytes": 1048576,
     "faults": {"load": {"delay_s": 0.5, "corrupt_every": 3}, "store": {"hang": true}}}
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from kvtier.errors import StoreFault
from kvtier.plugin_api import option_fields as option
from kvtier.plugin_api.options import Options

if TYPE_CHECKING:
    from collections.abc import Mapping

OPERATIONS: Final = ("probe", "load", "store", "remove")


@dataclass
class OperationFaults:
    """Faults of one operation. May be changed while the tier runs.

    A block is hit if its key is in ``keys`` or its number, counted over the
    backend's life, is a multiple of the ``..._every`` in question (0: none).
    """

    delay_s: option.Seconds = 0.0
    """wait this many seconds first"""
    hang: option.Flag = False
    """never answer"""
    error: option.Text | BaseException | None = None
    """raise this (a text becomes a `StoreFault`)"""
    fail_keys: option.ReadApart[frozenset[bytes]] = frozenset()
    """these blocks are FAILED"""
    fail_every: option.Integer = 0
    """every n-th block is FAILED"""
    corrupt_keys: option.ReadApart[frozenset[bytes]] = frozenset()
    """load only: these come with a bit flipped"""
    corrupt_every: option.Integer = 0
    """load only: every n-th block comes with a bit flipped"""
    answers_missing: option.Integer = 0
    """leave out this many answers at the end"""
    full: option.Flag = False
    """store only: every block is FULL"""
    calls_skipped: option.Integer = 0
    """the first so many calls are sound"""
    calls_max: option.Integer | None = None
    """so many calls after these are hit; by default all"""
    _calls: int = field(default=0, init=False)
    _blocks: int = field(default=0, init=False)

    def next_call(self) -> bool:
        """Count one call, and return whether it is to be hit."""
        self._calls += 1
        hit = self._calls - self.calls_skipped
        return hit > 0 and (self.calls_max is None or hit <= self.calls_max)

    def next_block(self, key: bytes) -> tuple[bool, bool]:
        """Count one block, and return whether it fails and whether it is corrupted."""
        self._blocks += 1
        return (
            key in self.fail_keys or _every(self._blocks, self.fail_every),
            key in self.corrupt_keys or _every(self._blocks, self.corrupt_every),
        )

    def exception(self) -> BaseException | None:
        """Return the exception to raise, None if there is none."""
        return StoreFault(self.error) if isinstance(self.error, str) else self.error


@dataclass
class FaultScript:
    """Faults of each operation of a ``MemoryBackend``."""

    probe: OperationFaults = field(default_factory=OperationFaults)
    load: OperationFaults = field(default_factory=OperationFaults)
    store: OperationFaults = field(default_factory=OperationFaults)
    remove: OperationFaults = field(default_factory=OperationFaults)

    @classmethod
    def from_options(cls, values: Mapping[str, Any], where: str) -> FaultScript:
        """Build from the mapping ``faults`` of a tier. Raises ``ConfigError``."""
        reader = Options(values, f"{where}, faults")
        parts = {name: _operation(reader, name, where) for name in OPERATIONS}
        reader.finish()
        return cls(**parts)


def _operation(script: Options, name: str, where: str) -> OperationFaults:
    reader = Options(script.mapping(name), f"{where}, faults.{name}")
    faults = OperationFaults(
        fail_keys=_keys(reader, "fail_keys"),
        corrupt_keys=_keys(reader, "corrupt_keys"),
        **option.read(OperationFaults, reader),
    )
    reader.finish()
    return faults


def _keys(reader: Options, name: str) -> frozenset[bytes]:
    """Read keys as one text of hex numbers with spaces between."""
    text = reader.text(name, "")
    try:
        return frozenset(bytes.fromhex(word) for word in text.split())
    except ValueError:
        raise reader.error(name, text, "must be keys in hex, with spaces between") from None


def _every(number: int, step: int) -> bool:
    return step > 0 and number % step == 0
