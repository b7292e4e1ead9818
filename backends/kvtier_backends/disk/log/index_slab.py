"""Keeps the records of one region's blocks (key, digest, times) in flat arrays, by slot."""

from __future__ import annotations

from array import array
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from kvtier.errors import InternalError, Misuse
from kvtier.plugin_api.backend import DIGEST_BYTES
from kvtier_backends.disk.format import TAG_BYTES, check_key_lengths

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


class Slab:
    """The blocks of one region. A length of 0 marks a slot without a block."""

    __slots__ = ("digests", "key_width", "keys", "lengths", "stored_s", "tags", "used_s")

    def __init__(self, slots: int, key_width: int, *, encrypted: bool) -> None:
        self.key_width = key_width
        self.keys = bytearray(slots * key_width)
        self.lengths = bytearray(slots)  # of the key
        self.digests = bytearray(slots * DIGEST_BYTES)
        self.tags = bytearray(slots * TAG_BYTES if encrypted else 0)
        self.stored_s = array("I", bytes(4 * slots))
        self.used_s = array("I", bytes(4 * slots))

    def key(self, slot: int) -> bytes:
        """Return the key at a slot that has a block."""
        start = slot * self.key_width
        return bytes(self.keys[start : start + self.lengths[slot]])

    def holds(self, slot: int, key: bytes) -> bool:
        """Return whether the slot has this key's block."""
        return self.lengths[slot] == len(key) and self.keys.startswith(key, slot * self.key_width)

    def count_held(self, slot: int, keys: Sequence[bytes], start: int) -> int:
        """Return how many keys, from ``start`` on, have the blocks from ``slot`` on."""
        count = min(len(keys) - start, len(self.lengths) - slot)
        if count <= 0 or not self.holds(slot, keys[start]):
            return 0
        width = self.key_width
        keys = keys[start : start + count]
        if (
            all(map(width.__eq__, map(len, keys)))
            and self.lengths.startswith(bytes((width,)) * count, slot)
            and self.keys.startswith(b"".join(keys), slot * width)
        ):
            return count
        held = 1
        while held < count and self.holds(slot + held, keys[held]):
            held += 1
        return held

    def put(
        self,
        start: int,
        keys: Sequence[bytes],
        digests: Sequence[bytes],
        tags: Sequence[bytes],
        stored_s: Sequence[int],
        used_s: Sequence[int],
    ) -> None:
        """Put blocks at neighbouring slots, which must be free."""
        stop = start + len(keys)
        lengths = tuple(map(len, keys))
        check_key_lengths(lengths)
        if stop > len(self.lengths) or any(self.lengths[start:stop]):
            raise InternalError(f"slots {start} to {stop} are not all free")
        if max(lengths) > self.key_width:
            self.widen(max(lengths))
        width = self.key_width
        if min(lengths) < width:
            keys = [key.ljust(width, b"\0") for key in keys]
        _overwrite(self.keys, start * width, b"".join(keys), stop * width)
        _overwrite(self.digests, start * DIGEST_BYTES, b"".join(digests), stop * DIGEST_BYTES)
        if self.tags:
            _overwrite(self.tags, start * TAG_BYTES, b"".join(tags), stop * TAG_BYTES)
        self.stored_s[start:stop] = array("I", stored_s)
        self.used_s[start:stop] = array("I", used_s)
        self.lengths[start:stop] = bytes(lengths)

    def forget(self, slot: int) -> None:
        """Free a slot."""
        self.lengths[slot] = 0

    def use(self, slot: int, count: int, now_s: int) -> None:
        """Note that the blocks at neighbouring slots were read."""
        self.used_s[slot : slot + count] = array("I", [now_s]) * count

    def widen(self, key_width: int) -> None:
        """Make room for longer keys."""
        old, width = self.keys, self.key_width
        self.keys = bytearray(len(self.lengths) * key_width)
        for slot, length in enumerate(self.lengths):
            if length:
                start = slot * width
                self.keys[slot * key_width : slot * key_width + length] = old[
                    start : start + length
                ]
        self.key_width = key_width

    # --- a whole region at once ---

    def put_page(self, records: NDArray[Any], now_s: int) -> None:
        """Put records of a table page (``record_dtype``) at their slots, overwriting any there."""
        slots = records["slot"]
        keys = self._rows_of_keys()
        keys[slots, : records["key"].shape[1]] = records["key"]
        np.frombuffer(self.lengths, np.uint8)[slots] = records["length"]
        np.frombuffer(self.digests, f"V{DIGEST_BYTES}")[slots] = records["digest"]
        stored_s = np.minimum(records["stored_s"], np.uint32(now_s))
        np.frombuffer(self.stored_s, np.uint32)[slots] = stored_s
        np.frombuffer(self.used_s, np.uint32)[slots] = stored_s
        if self.tags:
            np.frombuffer(self.tags, f"V{TAG_BYTES}")[slots] = records["tag"]

    def expire(self, before_s: int) -> int:
        """Forget the blocks that were stored before a time; return how many."""
        lengths = np.frombuffer(self.lengths, np.uint8)
        expired = (lengths > 0) & (np.frombuffer(self.stored_s, np.uint32) < before_s)
        lengths[expired] = 0
        return int(expired.sum())

    def forget_all(self, slots: NDArray[np.int64]) -> None:
        """Free these slots."""
        np.frombuffer(self.lengths, np.uint8)[slots] = 0

    def slots(self) -> NDArray[np.int64]:
        """Return the slots that have a block, in order."""
        return np.flatnonzero(np.frombuffer(self.lengths, np.uint8))

    def keys_at(self, slots: NDArray[np.int64]) -> list[bytes]:
        """Return the keys at slots that have a block."""
        lengths = np.frombuffer(self.lengths, np.uint8)[slots]
        if not len(slots) or int(lengths.min()) != int(lengths.max()):
            return [self.key(slot) for slot in slots.tolist()]
        length = int(lengths[0])
        flat = self._rows_of_keys()[slots, :length].tobytes()
        return [flat[start : start + length] for start in range(0, len(flat), length)]

    def _rows_of_keys(self) -> NDArray[np.uint8]:
        return np.frombuffer(self.keys, np.uint8).reshape(-1, self.key_width)


@cache
def record_dtype(key_width: int, tag_bytes: int) -> np.dtype[Any]:
    """Return the layout of a record (``format.record_struct``) as a numpy dtype."""
    fields: list[tuple[str, str]] = [("slot", "<u4"), ("stored_s", "<u4"), ("length", "u1")]
    fields.append(("digest", f"V{DIGEST_BYTES}"))
    if tag_bytes:
        fields.append(("tag", f"V{tag_bytes}"))
    return np.dtype([*fields, ("key", f"({key_width},)u1")])


def _overwrite(column: bytearray, start: int, data: bytes, stop: int) -> None:
    """Overwrite a stretch of a column; data of another length would move the rest."""
    if len(data) != stop - start:
        raise Misuse(f"{len(data)} bytes for {stop - start}: digests and tags have one length.")
    column[start:stop] = data
