"""The options of the ``disk`` tier, read. Nothing is touched but the file of encryption keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kvtier.plugin_api.options import Options
from kvtier_backends.disk.encryption.encrypted_log import make_encrypted_log
from kvtier_backends.disk.format import PAGE_BYTES, TAG_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvtier.plugin_api.backend import BackendContext
    from kvtier_backends.disk.encryption.encrypted_log import EncryptedLog

IO_DEPTH: Final = 8
IO_DEPTH_MAX: Final = 1024
CHECKSUM: Final = "xxh3_128"


class DiskOptions(NamedTuple):
    """The options, read."""

    path: str
    capacity_bytes: int
    region_bytes: int | None
    ttl_s: int
    io_depth: int
    direct: bool
    encrypted_log: EncryptedLog | None

    @property
    def tag_bytes(self) -> int:
        """What encryption adds to each block."""
        return 0 if self.encrypted_log is None else TAG_BYTES


def read_options(
    options: Mapping[str, Any], context: BackendContext
) -> tuple[Options, DiskOptions]:
    """Read the options, and the keys that they name. Raises ``ConfigError``."""
    reader = Options(options, f"secondary tier {context.tier_name}")
    given = DiskOptions(
        reader.path("path"),
        reader.size("capacity_bytes", minimum=1),
        reader.size("region_bytes", minimum=PAGE_BYTES) if reader.has("region_bytes") else None,
        reader.integer("ttl_s", 0, maximum=1 << 31),
        reader.integer("io_depth", IO_DEPTH, minimum=1, maximum=IO_DEPTH_MAX),
        reader.flag("direct", default=True),
        None,
    )
    reader.allow("region_bytes", "checksum")
    if options.get("checksum") not in (None, CHECKSUM):
        raise reader.error(
            "checksum",
            options["checksum"],
            f"must be {CHECKSUM!r}: all that is read is checked, whatever it costs. Remove it",
        )
    encrypted_log = make_encrypted_log(reader, context)
    reader.finish()
    return reader, given._replace(encrypted_log=encrypted_log)
