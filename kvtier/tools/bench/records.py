"""Prints what it costs to protect blocks of shared storage: nothing, a signature, or encryption.

A block goes through ``Records`` and back, as in a backend's thread, and through
the checksum that the tier's driver computes in any case. Time is that of the
processor, for one thread; each figure is the best of five rounds. The second
table has what a signature could be made with instead::

    python -m kvtier.tools.bench.records
"""

from __future__ import annotations

import hashlib
import hmac
import os
import time
from typing import TYPE_CHECKING, Final, TypeVar

from kvtier.plugin_api.backend import BackendContext, Namespace, StoreBlock, block_digest
from kvtier_backends.encryption.keys import KEY_BYTES, Keyring
from kvtier_backends.encryption.signer import BlockSigner
from kvtier_backends.shared.protected_records import EncryptedRecords, SignedRecords
from kvtier_backends.shared.records import Records

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvtier_backends.shared.records import Record

T = TypeVar("T")

BLOCK_BYTES: Final = (64 << 10, 1 << 20)
WORKING_SET_BYTES: Final = 64 << 20  # more than a core's own cache: blocks come from memory
ROUNDS: Final = 5
_KEY: Final = bytes(36)  # a SHA-256 and a group index


def main() -> None:
    """Measure and print."""
    print("| | 64 KiB: GB/s | CPU s a GB | 1 MiB: GB/s | CPU s a GB |\n|---|---|---|---|---|")
    columns = [_forms(size) for size in BLOCK_BYTES]
    _print(columns)
    print("\n| MAC | 64 KiB: GB/s | CPU s a GB | 1 MiB: GB/s | CPU s a GB |\n|---|---|---|---|---|")
    _print([_macs(size) for size in BLOCK_BYTES])


def _print(columns: Sequence[dict[str, float]]) -> None:
    for name in columns[0]:
        cells = (f"{column[name]:.1f} | {1 / column[name]:.3f}" for column in columns)
        print(f"| {name} | {' | '.join(cells)} |")


def _forms(block_bytes: int) -> dict[str, float]:
    """Return GB/s of each form of records, in each direction."""
    context = BackendContext(block_bytes, Namespace({}), "bench")
    keyring = Keyring([os.urandom(KEY_BYTES)])
    blocks = _blocks(block_bytes)
    found = {"checksum (the driver's, in any case)": _speed(_digest, blocks)}
    for name, records in (
        ("plain", Records(context)),
        ("signed", SignedRecords(context, keyring)),
        ("encrypted", EncryptedRecords(context, keyring)),
    ):
        found[f"{name}, store"] = _speed(_encoder(records), blocks)
        found[f"{name}, load"] = _speed(_decoder(records), [records.encode(b) for b in blocks])
    return found


def _macs(block_bytes: int) -> dict[str, float]:
    """Return GB/s of what could sign a block."""
    from cryptography.hazmat.primitives.poly1305 import Poly1305  # noqa: PLC0415 - an extra

    key = os.urandom(KEY_BYTES)
    signer = BlockSigner(Keyring([key]))
    macs: dict[str, Callable[[memoryview], object]] = {
        "GMAC (this one)": lambda block: signer.sign(_KEY, block),
        "Poly1305": lambda block: Poly1305.generate_tag(key, block),
        "BLAKE2b, keyed": lambda block: hashlib.blake2b(block, key=key).digest(),
        "HMAC-SHA-256": lambda block: hmac.digest(key, block, "sha256"),
    }
    views = [block.buffer for block in _blocks(block_bytes)]
    return {name: _speed(mac, views) for name, mac in macs.items()}


def _blocks(block_bytes: int) -> list[StoreBlock]:
    views = [memoryview(os.urandom(block_bytes)) for _ in range(WORKING_SET_BYTES // block_bytes)]
    return [StoreBlock(_KEY, view, block_digest(_KEY, view)) for view in views]


def _digest(block: StoreBlock) -> None:
    block_digest(block.key, block.buffer)


def _encoder(records: Records) -> Callable[[StoreBlock], None]:
    def encode(block: StoreBlock) -> None:
        records.give_back(records.encode(block).payload)

    return encode


def _decoder(records: Records) -> Callable[[Record], None]:
    """Return what decodes: in the slot, or from elsewhere into it."""
    slot = memoryview(bytearray(records.context.block_bytes))

    def decode(record: Record) -> None:
        buffer = record.payload if records.are_plain else slot
        records.decode_untrusted(_KEY, record.payload, record.trailer, buffer)

    return decode


def _speed(call: Callable[[T], object], items: Sequence[T]) -> float:
    """Return GB/s of one thread's processor time. ``items``: as many as fill the working set."""
    best_s = float("inf")
    for _ in range(ROUNDS):
        started_s = time.thread_time()
        for item in items:
            call(item)
        best_s = min(best_s, time.thread_time() - started_s)
    return WORKING_SET_BYTES / best_s / 1e9


if __name__ == "__main__":
    main()
