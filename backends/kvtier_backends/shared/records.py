"""Reads the options by which tiers on shared storage compress and protect their blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvtier.plugin_api import option_fields as option  # noqa: TC001 - read at run time
from kvtier.plugin_api.extras import install
from kvtier_backends.encryption.keys import (
    AUTH_KEY,
    ENCRYPTION_KEY,
    given_option,
    read_keyring,
    refuse_missing_package,
)
from kvtier_backends.shared.compression import BITPLANE_ZSTD, COMPRESSION, BlockCompressor
from kvtier_backends.shared.plain_records import Record as Record
from kvtier_backends.shared.plain_records import Records as Records
from kvtier_backends.shared.protected_records import EncryptedRecords, SignedRecords

if TYPE_CHECKING:
    from kvtier.plugin_api.backend import BackendContext
    from kvtier.plugin_api.options import Options

_COMPRESSED_DTYPE: Final = "bfloat16"
"""Measured: float16 shrinks to 87 %, and 8-bit floats to 93 %, too little to be worth it."""


@dataclass(frozen=True, kw_only=True)
class ProtectionOptions:
    """The options, which each backend on shared storage has besides its own."""

    compression: option.ReadApart[str | None] = None
    """`"bitplane-zstd"` [compresses](../../explanation/compression.md) blocks of bfloat16, without
    loss, to some 69 % of their size. Refused: keys and values of another type. Needs the extra
    [`compression`](../configuration.md#extras)"""
    auth_key_file: option.ReadApart[str | None] = None
    """a file of mode 0600 with 1 to 16 keys, 64 hex digits each, one in each line, which all
    engines that share the blocks have: the first one signs, all verify. A block that none of them
    signed is a miss. Needs the extra [`protection`](../configuration.md#extras). See
    [Protect shared storage](../../how-to/protect-shared-storage.md)"""
    auth_key_env: option.ReadApart[str | None] = None
    """the environment variable that holds them instead. Refused: both options; a key of another
    length; none, or more than 16; a file that others may read"""
    encryption_key_file: option.ReadApart[str | None] = None
    """a file of the same form: the first key encrypts blocks with AES-256-GCM, all decrypt. An
    encrypted block is authenticated too. Refused: together with keys that sign"""
    encryption_key_env: option.ReadApart[str | None] = None
    """the environment variable that holds them instead. Refused: as above"""


def make_records(reader: Options, context: BackendContext) -> Records:
    """Return the ``Records`` that compress and protect blocks as the options say.

    Raises ``ConfigError``.

    Reads the key file, or the environment, and nothing else.
    """
    compressor = _make_compressor(reader, context)
    signing = read_keyring(reader, AUTH_KEY)
    encrypting = read_keyring(reader, ENCRYPTION_KEY)
    if signing is not None and encrypting is not None:
        raise reader.error(
            given_option(reader, AUTH_KEY),
            "...",
            f"is of no use with {given_option(reader, ENCRYPTION_KEY)}: an encrypted block is "
            "authenticated too. Remove it",
        )
    try:
        if signing is not None:
            return SignedRecords(context, signing, compressor)
        if encrypting is not None:
            return EncryptedRecords(context, encrypting, compressor)
    except ImportError:
        kind = AUTH_KEY if signing is not None else ENCRYPTION_KEY
        raise refuse_missing_package(reader, kind) from None
    return Records(context, compressor)


def _make_compressor(reader: Options, context: BackendContext) -> BlockCompressor | None:
    """Return the compressor of blocks, None if it was not requested. Raises ``ConfigError``."""
    reader.allow(COMPRESSION)
    if not reader.has(COMPRESSION):
        return None
    kind = reader.text(COMPRESSION, choices=(BITPLANE_ZSTD,))
    # Not known without an engine (``kvtier check``).
    kv_dtype = context.namespace.facts.get("kv_dtype", _COMPRESSED_DTYPE)
    if context.block_bytes % 2:
        raise reader.error(
            COMPRESSION, kind, f"has no use for blocks of {context.block_bytes} bytes. Remove it"
        )
    if kv_dtype != _COMPRESSED_DTYPE:
        raise reader.error(
            COMPRESSION,
            kind,
            f"is for keys and values of bfloat16, and this engine's are {kv_dtype}: compressing "
            "them would cost more than it saves. Remove it",
        )
    try:
        return BlockCompressor(context.block_bytes)
    except ImportError:
        raise reader.error(
            COMPRESSION, kind, f"needs a package: {install('compression')}"
        ) from None
