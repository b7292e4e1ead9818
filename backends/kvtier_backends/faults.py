"""Faults on order: what a test, or a soak run, wants a memory tier to do wrong.

A ``FaultScript`` has one ``OperationFaults`` for each operation. From the
configuration it is a mapping of the same names, keys in hex:

    {"type": "memory", "capacity_bytes": 1048576,
     "faults": {"load": {"delay_s": 0.5, "corrupt_every": 3}, "store": {"hang": true}}}
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from kvtier.errors import StoreFault
from kvtier.plugin_api.options import Options

if TYPE_CHECKING:
    from collections.abc import Mapping

OPERATIONS: Final = ("probe", "load", "store", "remove")


@dataclass
class OperationFaults:
    """What goes wrong with one operation. May be changed while the tier runs.

    A block is hit if its key is in ``keys`` or its number, counted over the
    backend's life, is a multiple of the ``..._every`` in question (0: none).
    """

    delay_s: float = 0.0  #: wait this many seconds first
    hang: bool = False  #: never answer
    error: str | BaseException | None = None  #: raise this (a text becomes a ``StoreFault``)
    fail_keys: frozenset[bytes] = frozenset()  #: these blocks are FAILED
    fail_every: int = 0  #: every n-th block is FAILED
    corrupt_keys: frozenset[bytes] = frozenset()  #: load only: these come with a bit flipped
    corrupt_every: int = 0  #: load only: every n-th block comes with a bit flipped
    answers_missing: int = 0  #: leave out this many answers at the end
    full: bool = False  #: store only: every block is FULL
    calls_skipped: int = 0  #: the first so many calls are sound
    calls_max: int | None = None  #: and after that only so many are hit; None: all
    _calls: int = field(default=0, init=False)
    _blocks: int = field(default=0, init=False)

    def next_call(self) -> bool:
        """Count one call, and tell whether it is one of those to be hit."""
        self._calls += 1
        hit = self._calls - self.calls_skipped
        return hit > 0 and (self.calls_max is None or hit <= self.calls_max)

    def next_block(self, key: bytes) -> tuple[bool, bool]:
        """Count one block, and tell whether it fails and whether it is corrupted."""
        self._blocks += 1
        return (
            key in self.fail_keys or _every(self._blocks, self.fail_every),
            key in self.corrupt_keys or _every(self._blocks, self.corrupt_every),
        )

    def exception(self) -> BaseException | None:
        """Return what to raise, None for nothing."""
        return StoreFault(self.error) if isinstance(self.error, str) else self.error


@dataclass
class FaultScript:
    """What goes wrong with each operation of a ``MemoryBackend``."""

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
    reader.allow("delay_s", "calls_max")
    faults = OperationFaults(
        delay_s=reader.number("delay_s") if reader.has("delay_s") else 0.0,
        hang=reader.flag("hang", default=False),
        error=reader.text("error") if reader.has("error") else None,
        fail_keys=_keys(reader, "fail_keys"),
        fail_every=reader.integer("fail_every", 0),
        corrupt_keys=_keys(reader, "corrupt_keys"),
        corrupt_every=reader.integer("corrupt_every", 0),
        answers_missing=reader.integer("answers_missing", 0),
        full=reader.flag("full", default=False),
        calls_skipped=reader.integer("calls_skipped", 0),
        calls_max=reader.integer("calls_max") if reader.has("calls_max") else None,
    )
    reader.allow("error")
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
