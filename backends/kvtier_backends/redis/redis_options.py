"""Parses the options of the ``redis`` tier. Touches only the files that they name."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from msgspec import Meta

from kvtier.plugin_api import option_fields as option
from kvtier.plugin_api.options import Options
from kvtier_backends.redis.addresses import PORT, SENTINEL_PORT, Servers, parse_url
from kvtier_backends.redis.credentials import Credentials, read_credentials
from kvtier_backends.shared.records import (
    ProtectionOptions,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvtier.plugin_api.backend import BackendContext

_PREFIX: Final = re.compile(r"[A-Za-z0-9._:-]+")
_FILES: Final = ("tls_ca_file", "tls_cert_file", "tls_key_file")


@dataclass(frozen=True)
class RedisOptions(ProtectionOptions):
    """The parsed options."""

    url: option.Text
    """`redis://host:port`, `rediss://` for TLS, or `unix:///path` of a socket. Several nodes of a
    cluster, or several sentinels: `redis://host1:port,host2:port`. Refused: a user or password in
    it; anything behind the port"""
    mode: Literal["standalone", "cluster", "sentinel"] = "standalone"
    """what `url` names: one server, nodes of a cluster, or sentinels"""
    sentinel_master: option.Text | None = None
    """the name by which the sentinels know the servers; needed with `sentinel` only"""
    sentinel_auth: option.Flag = False
    """log in to the sentinels as well, as to the servers"""
    db: Annotated[option.Integer, Meta(le=65535)] = 0
    """number of the database. Refused: another than 0 in a cluster"""
    key_prefix: option.Text = "kvtier"
    """beginning of the name of everything that the tier stores. Refused: other characters than
    letters, digits and `._:-`"""
    username: option.Text | None = None
    """the ACL user; by default that of the server's `requirepass`"""
    password_file: option.ReadApart[str | None] = None
    """a file of mode 0600 with the password; read again at each login"""
    password_env: option.ReadApart[str | None] = None
    """the environment variable that holds the password instead"""
    password_command: option.ReadApart[str | None] = None
    """a command that prints the password instead, such as a token that lasts for minutes; run
    without a shell when the tier logs in, for 10 seconds at most. Refused: more than one of the
    three"""
    tls_ca_file: option.ReadApart[str | None] = None
    """certificates (PEM) to trust besides the system's; this and the next two files are read again
    when they have changed"""
    tls_cert_file: option.ReadApart[str | None] = None
    """the tier's own certificate (PEM), for servers that ask for one"""
    tls_key_file: option.ReadApart[str | None] = None
    """the key of `tls_cert_file` (PEM)"""
    tls_check_hostname: option.Flag = True
    """refuse a server whose certificate has another name than the one that it was reached by"""
    ttl_s: Annotated[option.WholeSeconds, Meta(le=1 << 31)] = 0
    """seconds after which the server drops a block; 0: never"""
    presence_ttl_s: option.Seconds = 60.0
    """for how long a block that was stored or found is believed to be there, since the server may
    evict it"""
    connections_max: Annotated[option.Integer, Meta(ge=2, le=1024)] = 8
    """connections to each server; half of them, at most, store"""
    connect_timeout_s: Annotated[option.Seconds, Meta(le=3600.0)] = 2.0
    """how long connecting may take"""
    call_timeout_s: Annotated[option.Seconds, Meta(le=3600.0)] = 10.0
    """how long one call may take, the wait for a connection included; the tier's own timeouts may
    end it earlier"""
    servers: Servers = field(kw_only=True)
    credentials: Credentials = field(kw_only=True)

    @property
    def capped_presence_ttl_s(self) -> float:
        """Time for which a block's presence is trusted."""
        return min(self.presence_ttl_s, float(self.ttl_s)) if self.ttl_s else self.presence_ttl_s

    @property
    def place(self) -> str:
        """Identity of the tier's storage, which two tiers must not share."""
        name = f"/{self.sentinel_master}" if self.sentinel_master else ""
        return f"{self.servers}{name}/{self.db}/{self.key_prefix}"


def read_options(
    options: Mapping[str, Any], context: BackendContext
) -> tuple[Options, RedisOptions]:
    """Parse the options, read the password. Raises ``ConfigError``; others may read more."""
    reader = Options(options, f"secondary tier {context.tier_name}")
    values = option.read(RedisOptions, reader)
    values |= {key: reader.path(key) for key in _FILES if reader.has(key)}
    port = SENTINEL_PORT if values["mode"] == "sentinel" else PORT
    given = RedisOptions(
        **values,
        servers=parse_url(values["url"], reader.where, port),
        credentials=read_credentials(reader, values["username"]),
    )
    _refuse_what_does_not_fit(reader, given)
    return reader, given


def _refuse_what_does_not_fit(reader: Options, given: RedisOptions) -> None:
    """Raise ``ConfigError`` for options that are valid alone, but not together."""
    is_sentinel = given.mode == "sentinel"
    if is_sentinel and not given.sentinel_master:
        raise reader.error("mode", given.mode, "needs sentinel_master. Set it")
    if given.sentinel_master and not is_sentinel:
        remedy = "is for mode 'sentinel' alone. Set mode, or remove it"
        raise reader.error("sentinel_master", given.sentinel_master, remedy)
    if given.mode == "standalone" and len(given.servers.addresses) > 1:
        remedy = "names several servers. Set mode to 'cluster' or 'sentinel', or name one"
        raise reader.error("url", given.url, remedy)
    if given.mode != "standalone" and given.servers.addresses[0].path:
        raise reader.error("url", given.url, "is a socket, which needs mode 'standalone'")
    if given.mode == "cluster" and given.db:
        raise reader.error("db", given.db, "does not exist in a cluster. Remove it")
    if not _PREFIX.fullmatch(given.key_prefix):
        # A brace would make a hash tag, which puts all blocks on one node of a cluster.
        remedy = "may hold letters, digits and ._:- only. Change it"
        raise reader.error("key_prefix", given.key_prefix, remedy)
    for key in _FILES:
        if reader.has(key) and not given.servers.is_tls:
            raise reader.error(key, getattr(given, key), "needs a url that begins with rediss://")
    if (given.tls_cert_file is None) != (given.tls_key_file is None):
        key = "tls_cert_file" if given.tls_key_file is None else "tls_key_file"
        remedy = (
            "needs tls_key_file too" if given.tls_key_file is None else "needs tls_cert_file too"
        )
        raise reader.error(key, getattr(given, key), f"{remedy}. Give both or none")
