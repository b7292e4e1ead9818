"""Maps the primary tier's bytes: one region, cut into equal slots.

Both cells map the region; messages carry slot numbers, and only a tier's
driver turns a number into memory. Access to slots is governed by the primary tier
(``kvtier/engine/primary/primary_tier.py``), not by this module.
"""

from __future__ import annotations

import mmap
import os
import weakref
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final

from kvtier.errors import ConfigError
from kvtier.plugin_api.keys import GROUP_BYTES
from kvtier.plugin_api.machine import free_memory_bytes as free_memory_bytes
from kvtier.plugin_api.machine import machine_memory_bytes as machine_memory_bytes
from kvtier.plugin_api.threads import daemon_thread

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MADV_POPULATE_WRITE: Final = 23
"""Advice to ``madvise``: fault pages in, writable. Linux 5.14; Python has no name for it."""

_ZEROS: Final = memoryview(bytes(64 << 10))  # so much at a time: in between, other threads may run

_POPULATE_STEP_BYTES: Final = 64 << 20  # a millisecond or two, in which no other thread runs


class SlotMemory:
    """``slot_count`` slots of ``block_bytes`` bytes each.

    Slots start at multiples of ``block_bytes`` from the region's start. If
    ``block_bytes`` is a multiple of the page size, slots are page aligned and
    a backend may read into them with O_DIRECT.
    """

    def __init__(
        self,
        buffer: memoryview,
        slot_count: int,
        block_bytes: int,
        *,
        descriptor: int | None = None,
        rests: Mapping[bytes, Sequence[tuple[int, int]]] | None = None,
    ) -> None:
        """``descriptor``: the open file whose first bytes these are, for a process to map too.

        The caller keeps it open for as long as tiers may be started. ``rests``: by the KV-cache
        group at a key's end, begin and end of each part of a slot that its blocks leave unused.
        """
        if slot_count < 1 or block_bytes < 1:
            raise ConfigError(
                f"slot_count={slot_count!r} and block_bytes={block_bytes!r} must both be at "
                "least 1: give the primary tier room for one block."
            )
        flat = buffer.cast("B") if buffer.ndim != 1 or buffer.format != "B" else buffer
        if len(flat) < slot_count * block_bytes:
            raise ConfigError(
                f"a buffer of {len(flat)} bytes cannot hold slot_count={slot_count} blocks of "
                f"block_bytes={block_bytes}. Map a larger region or lower slot_count."
            )
        self.slot_count = slot_count
        self.block_bytes = block_bytes
        self.descriptor = descriptor
        self.rests = dict(rests or {})
        self._flat = flat

    @classmethod
    def anonymous(cls, slot_count: int, block_bytes: int) -> SlotMemory:
        """Make unnamed memory, for use without vLLM and for tests."""
        size = max(1, slot_count * block_bytes)
        descriptor = os.memfd_create("kvtier-slots")
        try:
            os.ftruncate(descriptor, size)
            buffer = memoryview(mmap.mmap(descriptor, size))
            memory = cls(buffer, slot_count, block_bytes, descriptor=descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        # Not at the process's exit, when tiers may still be started: it ends with the process.
        finalizer = weakref.finalize(memory, os.close, descriptor)
        finalizer.atexit = False
        return memory

    @classmethod
    def of_descriptor(
        cls,
        descriptor: int,
        slot_count: int,
        block_bytes: int,
        rests: Mapping[bytes, Sequence[tuple[int, int]]] | None = None,
    ) -> SlotMemory:
        """Map the memory of another process's ``descriptor``, and close the descriptor.

        A thread fills this process's page table, so that the first transfers need not.
        """
        try:
            mapping = mmap.mmap(descriptor, slot_count * block_bytes)
        except BaseException:
            os.close(descriptor)
            raise
        daemon_thread(partial(_populate, mapping, descriptor)).start()
        return cls(memoryview(mapping), slot_count, block_bytes, rests=rests)

    @property
    def buffer(self) -> memoryview:
        """All slots, one after the other, writable, without a copy. Valid until ``release``."""
        return self._flat[: self.slot_count * self.block_bytes]

    def view(self, slot: int) -> memoryview:
        """Return the writable bytes of ``slot``, without a copy."""
        if not 0 <= slot < self.slot_count:
            raise IndexError(f"slot {slot} is outside 0..{self.slot_count - 1}")
        start = slot * self.block_bytes
        return self._flat[start : start + self.block_bytes]

    def views(self, slots: Sequence[int]) -> list[memoryview]:
        """Return the views of several slots, in the order given."""
        return [self.view(slot) for slot in slots]

    def clear_rests(self, keys: Sequence[bytes], slots: Sequence[int]) -> None:
        """Zero the parts of their slots that blocks of these keys leave unused: data of others.

        They are not read as part of a block: a slot may be read meanwhile, and cleared by several.
        """
        if not self.rests:
            return
        for key, slot in zip(keys, slots, strict=True):
            for begin, end in self.rests.get(key[-GROUP_BYTES:], ()):
                view = self.view(slot)[begin:end]
                for at in range(0, len(view), len(_ZEROS)):
                    piece = view[at : at + len(_ZEROS)]
                    piece[:] = _ZEROS[: len(piece)]

    def release(self) -> None:
        """Release the buffer, so that its owner can unmap it."""
        self._flat.release()


def _populate(mapping: mmap.mmap, descriptor: int) -> None:
    """Fault in the pages that the memory has. Pages not touched yet stay without."""
    end = 0
    with suppress(OSError):  # no more pages; or a kernel without support: a little slower
        while end < len(mapping):
            start = os.lseek(descriptor, end, os.SEEK_DATA)
            end = min(os.lseek(descriptor, start, os.SEEK_HOLE), len(mapping))
            for at in range(start, end, _POPULATE_STEP_BYTES):
                mapping.madvise(MADV_POPULATE_WRITE, at, min(_POPULATE_STEP_BYTES, end - at))
    os.close(descriptor)
