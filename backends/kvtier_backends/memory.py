"""The ``memory`` backend: a bounded dictionary, for tests and as a yardstick.

Its measured cost is that of the layers above. It can also be set to fail in
every way that a real tier does, see ``kvtier_backends.faults``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple, TypeVar

import anyio
from msgspec import Meta

from kvtier.errors import Misuse, StoreFault
from kvtier.plugin_api import option_fields as option
from kvtier.plugin_api.backend import (
    Backend,
    BackendContext,
    BackendTraits,
    LoadBlock,
    Loaded,
    Outcome,
    StoreBlock,
)
from kvtier.plugin_api.metrics import CAPACITY_BYTES, USED_BYTES, Counter, Gauge
from kvtier.plugin_api.options import Options
from kvtier.plugin_api.slot_memory import machine_memory_bytes
from kvtier_backends.faults import FaultScript, OperationFaults

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvtier.plugin_api.metrics import BackendMetric

_PARTS_MAX = 16

Answer = TypeVar("Answer")


class _Kept(NamedTuple):
    block: bytes
    digest: bytes


@dataclass(frozen=True)
class MemoryOptions:
    """The parsed options."""

    capacity_bytes: Annotated[option.Size, Meta(ge=1)]
    """bytes of blocks. Refused: too small for one block; more than the machine's memory"""
    faults: option.ReadApart[FaultScript | None] = None
    """a mapping: faults to inject, for tests"""


class MemoryBackend(Backend):
    """Keeps blocks in this process's memory, up to ``capacity_bytes`` of them.

    Tests may set ``faults`` directly. A block that does not fit is FULL: the tier above evicts.
    A cancelled call has done all of its work or, if it was still being
    delayed, none. Closing forgets everything.
    """

    type_name: ClassVar[str] = "memory"
    metrics: ClassVar[Mapping[str, BackendMetric]] = {
        "capacity_bytes": CAPACITY_BYTES,
        "used_bytes": USED_BYTES,
        "blocks": Gauge("Blocks that the tier holds."),
        "stores_full": Counter("Blocks that the tier had no room for."),
    }
    medium: ClassVar[str] = "CPU"

    def __init__(
        self, context: BackendContext, capacity_blocks: int, faults: FaultScript | None = None
    ) -> None:
        self.traits = BackendTraits(
            load_batches_max=_PARTS_MAX,
            store_batches_max=_PARTS_MAX,
            capacity_blocks=capacity_blocks,
        )
        self.faults = FaultScript() if faults is None else faults
        self._block_bytes = context.block_bytes
        self._capacity_blocks = capacity_blocks
        self._kept: dict[bytes, _Kept] = {}
        self._stores_full = 0

    @classmethod
    def from_options(cls, options: Mapping[str, Any], context: BackendContext) -> MemoryBackend:
        """Check the options; raises ``ConfigError``."""
        where = f"secondary tier {context.tier_name}"
        reader = Options(options, where)
        capacity_bytes = MemoryOptions(**option.read(MemoryOptions, reader)).capacity_bytes
        capacity_blocks = capacity_bytes // context.block_bytes
        if capacity_blocks == 0:
            raise reader.error(
                "capacity_bytes",
                capacity_bytes,
                f"has no room for one block of {context.block_bytes} bytes; raise it",
            )
        if context.read_only:
            remedy = "leaves it empty: nothing of memory outlives an engine. Remove it"
            raise reader.error("read_only", context.read_only, remedy)
        most = machine_memory_bytes()
        if most is not None and capacity_bytes > most:
            raise reader.error(
                "capacity_bytes",
                capacity_bytes,
                f"is more than the {most} bytes of memory that there are; lower it",
            )
        faults = FaultScript.from_options(reader.mapping("faults"), where)
        reader.finish()
        return cls(context, capacity_blocks, faults)

    @classmethod
    def check_keys(cls, options: Mapping[str, Any], context: BackendContext) -> None:
        """Check all options."""
        cls.check_options(options, context)

    @classmethod
    def check_options(cls, options: Mapping[str, Any], context: BackendContext) -> None:
        """Build one and drop it: it holds nothing yet."""
        cls.from_options(options, replace(context, block_bytes=max(1, context.block_bytes)))

    async def probe(self, keys: Sequence[bytes]) -> Sequence[bool]:
        """Look up the keys; a key that is set to fail counts as missing."""
        hit = await _begin(self.faults.probe)
        found = [key in self._kept and not _failing(self.faults.probe, key, hit) for key in keys]
        return _end(self.faults.probe, hit, found)

    async def load(self, blocks: Sequence[LoadBlock]) -> Sequence[Loaded]:
        """Copy each block into its buffer."""
        hit = await _begin(self.faults.load)
        loaded = [self._load_one(block, hit) for block in blocks]
        return _end(self.faults.load, hit, loaded)

    async def store(self, blocks: Sequence[StoreBlock]) -> Sequence[Outcome]:
        """Copy each block, as long as there is room."""
        hit = await _begin(self.faults.store)
        outcomes = [self._store_one(block, hit) for block in blocks]
        return _end(self.faults.store, hit, outcomes)

    async def remove(self, keys: Sequence[bytes]) -> None:
        """Forget the keys, except those that are set to fail. Raises ``StoreFault`` for them."""
        hit = await _begin(self.faults.remove)
        failing = [key for key in keys if _failing(self.faults.remove, key, hit)]
        for key in set(keys).difference(failing):
            self._kept.pop(key, None)
        if failing:
            raise StoreFault(f"{len(failing)} blocks were to stay")

    async def close(self) -> None:
        """Forget everything. Never waits."""
        self._kept.clear()

    def counters(self) -> Mapping[str, int]:
        """Return how full the memory is, and how much was refused so far."""
        return {
            "capacity_bytes": self._capacity_blocks * self._block_bytes,
            "used_bytes": len(self._kept) * self._block_bytes,
            "blocks": len(self._kept),
            "stores_full": self._stores_full,
        }

    def _load_one(self, block: LoadBlock, hit: bool) -> Loaded:  # noqa: FBT001 - one call site
        self._check_length(block.buffer)
        fails, corrupts = self.faults.load.next_block(block.key) if hit else (False, False)
        if fails:
            return Loaded(Outcome.FAILED)
        kept = self._kept.get(block.key)
        if kept is None:
            return Loaded(Outcome.ABSENT)
        block.buffer[:] = kept.block
        if corrupts:  # its first byte: the middle of a padded row may lie behind the block
            block.buffer[0] ^= 1
        return Loaded(Outcome.DONE, kept.digest)

    def _store_one(self, block: StoreBlock, hit: bool) -> Outcome:  # noqa: FBT001 - one call site
        self._check_length(block.buffer)
        if hit and self.faults.store.next_block(block.key)[0]:
            return Outcome.FAILED
        if hit and self.faults.store.full:
            return self._full()
        if block.key in self._kept:
            return Outcome.DONE
        if len(self._kept) >= self._capacity_blocks:
            return self._full()
        self._kept[block.key] = _Kept(bytes(block.buffer), block.digest)
        return Outcome.DONE

    def _full(self) -> Outcome:
        self._stores_full += 1
        return Outcome.FULL

    def _check_length(self, buffer: memoryview) -> None:
        if buffer.nbytes != self._block_bytes:
            raise Misuse(
                f"a buffer of {buffer.nbytes} bytes is no block of {self._block_bytes}. "
                "Hand in whole slots."
            )


async def _begin(faults: OperationFaults) -> bool:
    """Delay, hang or raise as configured, and return whether this call is to be hit."""
    if not faults.next_call():
        return False
    if faults.delay_s > 0:
        await anyio.sleep(faults.delay_s)
    if faults.hang:
        await anyio.sleep_forever()
    error = faults.exception()
    if error is not None:
        raise error
    return True


def _end(faults: OperationFaults, hit: bool, answers: list[Answer]) -> list[Answer]:  # noqa: FBT001
    missing = faults.answers_missing if hit else 0
    return answers[: max(0, len(answers) - missing)]


def _failing(faults: OperationFaults, key: bytes, hit: bool) -> bool:  # noqa: FBT001
    return hit and faults.next_block(key)[0]
