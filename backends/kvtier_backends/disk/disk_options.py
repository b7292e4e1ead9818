"""Reads the options of the ``disk`` tier. Touches nothing but the file of encryption keys."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Final

from msgspec import Meta

from kvtier.plugin_api import option_fields as option
from kvtier.plugin_api.options import Options
from kvtier_backends.disk.encryption.encrypted_log import EncryptedLog, make_encrypted_log
from kvtier_backends.disk.format import PAGE_BYTES, TAG_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvtier.plugin_api.backend import BackendContext

CHECKSUM: Final = "xxh3_128"


@dataclass(frozen=True)
class DiskOptions:
    """The parsed options."""

    path: option.Path
    """the folder; created if missing. Refused: in use by another engine; not a folder; not
    writable; writable by everyone"""
    capacity_bytes: Annotated[option.Size, Meta(ge=1)]
    """bytes of all files together, never exceeded. Refused: too small for a few regions; more than
    2 to the 30th blocks; an index larger than the machine's memory"""
    region_bytes: Annotated[option.Size, Meta(ge=PAGE_BYTES)] | None = None
    """bytes that are overwritten at once; by default chosen by capacity. Refused: not a multiple of
    4096; too small for one block; too large for `capacity_bytes`"""
    ttl_s: Annotated[option.WholeSeconds, Meta(le=1 << 31)] = 0
    """age after which blocks expire; 0 disables expiry"""
    io_depth: Annotated[option.Integer, Meta(ge=1, le=1024)] = 8
    """number of concurrent loads, and of concurrent stores; while a load runs, a quarter as many
    stores, at least one"""
    direct: option.Flag = True
    """use O_DIRECT where the filesystem supports it"""
    allow_world_writable: option.Flag = False
    """use a folder that everyone may write to, as on mounts where chmod does nothing (SMB, Azure
    Files, gcsfuse). Anyone who can write there can plant blocks: set a key that encrypts"""
    checksum: option.ReadApart[str] = CHECKSUM
    """how blocks are verified; everything that is read is verified. Refused: any other value,
    including `false`"""
    encryption_key_file: option.ReadApart[str | None] = None
    """a file of mode 0600 with 1 to 16 keys for AES-256-GCM, 64 hex digits each, one a line: the
    first encrypts, all decrypt. Needs the extra [`protection`](../configuration.md#extras)"""
    encryption_key_env: option.ReadApart[str | None] = None
    """the environment variable that holds them instead. Refused: both options; a key of another
    length; none, or more than 16; a file that others may read"""
    encrypted_log: EncryptedLog | None = None

    @property
    def tag_bytes(self) -> int:
        """Bytes that encryption adds to each block."""
        return 0 if self.encrypted_log is None else TAG_BYTES


def read_options(
    options: Mapping[str, Any], context: BackendContext
) -> tuple[Options, DiskOptions]:
    """Read the options, and the keys that they name. Raises ``ConfigError``."""
    reader = Options(options, f"secondary tier {context.tier_name}")
    given = DiskOptions(**option.read(DiskOptions, reader))
    if options.get("checksum") not in (None, CHECKSUM):
        raise reader.error(
            "checksum",
            options["checksum"],
            f"must be {CHECKSUM!r}: all that is read is checked, whatever it costs. Remove it",
        )
    encrypted_log = make_encrypted_log(reader, context)
    reader.finish()
    return reader, replace(given, encrypted_log=encrypted_log)
