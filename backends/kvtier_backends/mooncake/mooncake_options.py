"""Parses the options of the ``mooncake`` tier. Touches nothing."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from msgspec import Meta

from kvtier.plugin_api import option_fields as option
from kvtier.plugin_api.options import Options
from kvtier_backends.shared.records import (
    ProtectionOptions,
    make_records,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvtier.plugin_api.backend import BackendContext
    from kvtier_backends.shared.records import Records

_PREFIX: Final = re.compile(r"[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*", re.ASCII)
_ADDRESS: Final = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\[\]:/\s]+):([0-9]{1,5})", re.ASCII)
SCHEME: Final = "://"
SERVERS_MAX: Final = {"etcd": 16, "redis": 1}
"""Services in which masters record the elected one, and the most servers of each."""


@dataclass(frozen=True)
class MooncakeOptions(ProtectionOptions):
    """The parsed options."""

    master: option.Text
    """the address of the master, such as `"10.0.0.1:50051"`; with masters that elect a leader, the
    service that records it, in the syntax of Mooncake's client:
    `"etcd://10.0.0.1:2379;10.0.0.2:2379"`, or `redis://`"""
    local_hostname: option.Text | None = None
    """the address, or name, by which other clients reach this engine, with or without a port; by
    default the local address from which it reaches the master"""
    metadata_server: option.Text = "P2PHANDSHAKE"
    """the service by which clients find each other; by default they query each other. An address
    such as `"http://10.0.0.1:8080/metadata"`"""
    protocol: Literal["tcp", "rdma"] = "tcp"
    """transport for blocks"""
    device: option.Text | None = None
    """the RDMA devices, with commas between; by default all that are found. Refused: with
    `tcp`"""
    segment_bytes: option.Size = 0
    """memory that this engine lends to the store, beside its primary tier; the blocks in it are
    lost when the engine ends. Refused: too small for one block"""
    local_buffer_bytes: option.Size = 16 << 20
    """memory in which the client stages transfers that need it"""
    ssd_offload_path: option.Text | None = None
    """a folder of this host, to which the store moves blocks of `segment_bytes` when it is full;
    the master must run with `--enable_offload`. Refused: without `segment_bytes`"""
    key_prefix: option.Text = "kvtier"
    """beginning of all names in the store. Refused: other characters than letters, digits, dots,
    dashes, underscores and slashes between them"""
    presence_ttl_s: option.Seconds = 30.0
    """time for which a block that was stored or found is assumed to exist"""
    replicas: Annotated[option.Integer, Meta(ge=1, le=64)] = 1
    """copies of each block, each in another segment"""
    soft_pin: option.Flag = False
    """the store evicts these blocks only after those that are not pinned"""
    timeout_s: Annotated[option.Seconds, Meta(le=600.0)] = 5.0
    """longest time that the client waits for the master, and for the next byte from another client,
    unless `MC_RPC_TIMEOUT_MS`, `MC_RPC_CONNECT_TIMEOUT_MS`, `MC_TCP_STATUS_TIMEOUT_SEC` or
    `MC_TCP_PROGRESS_TIMEOUT_SEC` is set"""
    n_read_threads: Annotated[option.Integer, Meta(ge=1, le=256)] = 4
    """concurrent loads"""
    n_write_threads: Annotated[option.Integer, Meta(ge=1, le=256)] = 2
    """concurrent stores"""

    @property
    def knock_addresses(self) -> list[tuple[str, int]]:
        """Host and port of the master, or of each server that knows the elected one."""
        servers = self.master.rpartition(SCHEME)[2].split(";")
        pairs = (server.rpartition(":") for server in servers)
        return [(host.strip("[]"), int(port)) for host, _, port in pairs]

    @property
    def place(self) -> str:
        """Identity of the tier's storage, which no other tier of the engine may share."""
        return f"mooncake://{self.master}/{self.key_prefix}"


def read_options(
    options: Mapping[str, Any], context: BackendContext
) -> tuple[Options, MooncakeOptions, Records]:
    """Parse the options, and those of block protection. Raises ``ConfigError``."""
    reader = Options(options, f"secondary tier {context.tier_name}")
    given = MooncakeOptions(**option.read(MooncakeOptions, reader))
    records = make_records(reader, context)
    reader.finish()
    if not _is_master(given.master):
        raise reader.error(
            "master",
            given.master,
            "must be a host and a port, as in host:50051, or those of the servers where an elected "
            "master is noted, as in etcd://host:2379;host2:2379",
        )
    if not _PREFIX.fullmatch(given.key_prefix):
        raise reader.error(
            "key_prefix",
            given.key_prefix,
            "must be letters, digits, dots, dashes and underscores, with slashes between them",
        )
    if given.device is not None and given.protocol != "rdma":
        raise reader.error("device", given.device, 'is for RDMA: remove it, or set protocol="rdma"')
    if given.ssd_offload_path is not None and given.segment_bytes == 0:
        raise reader.error(
            "ssd_offload_path",
            given.ssd_offload_path,
            "has nothing to move there: the store moves blocks from this engine's segment_bytes. "
            "Set them, or remove it",
        )
    if 0 < given.segment_bytes < context.block_bytes:
        raise reader.error(
            "segment_bytes",
            given.segment_bytes,
            f"has no room for one block of {context.block_bytes} bytes; raise it, or set 0",
        )
    return reader, given, records


def _is_master(text: str) -> bool:
    """Return whether it is the address of a master, or of servers that record an elected one."""
    kind, scheme, listed = text.rpartition(SCHEME)
    servers = listed.split(";")
    addresses = [_ADDRESS.fullmatch(server) for server in servers]
    most = SERVERS_MAX.get(kind, 0) if scheme else 1
    return len(servers) <= most and all(
        address is not None and 0 < int(address[2]) < 1 << 16 for address in addresses
    )
