"""What the tests of protected blocks share: keys, records of each form, and blocks in them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtier.plugin_api.backend import (
    BackendContext,
    LoadBlock,
    Loaded,
    Namespace,
    Outcome,
    StoreBlock,
    block_digest,
)
from kvtier.plugin_api.options import Options
from kvtier_backends.encryption.keys import parse_keys_untrusted
from kvtier_backends.shared.protected_records import EncryptedRecords, SignedRecords
from kvtier_backends.shared.records import Records, make_records

if TYPE_CHECKING:
    from pathlib import Path

    from kvtier_backends.shared.compression import BlockCompressor

BLOCK_BYTES = 640
OLD, NEW, FOREIGN = "11" * 32, "22" * 32, "33" * 32
CONTEXT = BackendContext(BLOCK_BYTES, Namespace({"model_name": "org/m", "dtype": "bf16"}), "1:x")
KEY = bytes(range(36))


def key_file(path: Path, *keys: str) -> str:
    path.write_text("# keys\n" + "\n".join(keys) + "\n")
    path.chmod(0o600)
    return str(path)


def signed(
    *keys: str, context: BackendContext = CONTEXT, compressor: BlockCompressor | None = None
) -> SignedRecords:
    return SignedRecords(context, parse_keys_untrusted("\n".join(keys)), compressor)


def encrypted(
    *keys: str, context: BackendContext = CONTEXT, compressor: BlockCompressor | None = None
) -> EncryptedRecords:
    return EncryptedRecords(context, parse_keys_untrusted("\n".join(keys)), compressor)


def made(context: BackendContext = CONTEXT, **options: str) -> Records:
    return make_records(Options(options, "secondary tier 1:x"), context)


def data_of(number: int) -> bytes:
    return b"".join(block_digest(bytes([number, at]), memoryview(b"")) for at in range(40))


def block_of(number: int, key: bytes = KEY) -> StoreBlock:
    view = memoryview(data_of(number))
    return StoreBlock(key, view, block_digest(key, view))


def stored(records: Records, block: StoreBlock) -> tuple[bytearray, bytearray]:
    """Return payload and trailer as they lie in storage."""
    payload, trailer = records.encode(block)
    return bytearray(payload), bytearray(trailer)


def loaded(
    records: Records,
    payload: bytes | bytearray,
    trailer: bytes | bytearray,
    key: bytes = KEY,
) -> bytes | None:
    """Return the bytes that are served, None for a miss: judged as the driver would."""
    block = LoadBlock(key, memoryview(bytearray(BLOCK_BYTES)))
    answer = records.decode_untrusted(key, memoryview(payload), bytes(trailer), block.buffer)
    if answer.outcome is not Outcome.DONE:
        assert answer == Loaded(Outcome.DAMAGED)
        return None
    # For itself alone it is not sound yet without a key. The driver compares.
    return bytes(block.buffer) if answer.digest == block_digest(key, block.buffer) else None
