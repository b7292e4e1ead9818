"""Parses the options of the ``redis`` tier. Touches only the files that they name.

The addresses in a ``url`` are of servers, of a cluster's nodes or of sentinels. A url must not hold
a user and a password, because it is shown in logs and refusals: no log line, error or ``repr``
shows those.

A password may change while the tier runs: tokens of managed servers last for minutes. So it is read
again at each login, from the file or with the command in the options, and a failure to read it
is a failed login like any other.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NamedTuple
from urllib.parse import urlsplit

from msgspec import Meta

from kvtier.errors import ConfigError, StoreFault
from kvtier.plugin_api import option_fields as option
from kvtier.plugin_api.options import Options, refusal, shown
from kvtier_backends.shared.records import ProtectionOptions
from kvtier_backends.shared.secrets import SecretCommand, read_secret_file

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvtier.plugin_api.backend import BackendContext


PORT: Final = 6379
SENTINEL_PORT: Final = 26379
SCHEMES: Final = ("redis", "rediss", "valkey", "valkeys", "unix")
_TLS_SCHEMES: Final = ("rediss", "valkeys")


class Address(NamedTuple):
    """Address of one server: a host and a port, or a Unix socket."""

    host: str
    port: int
    path: str = ""  #: of a Unix socket; then there is no host

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return self.path or f"{host}:{self.port}"


class Servers(NamedTuple):
    """The parsed ``url``."""

    addresses: tuple[Address, ...]  #: sorted, without duplicates
    is_tls: bool

    def __str__(self) -> str:
        scheme = "rediss" if self.is_tls else "redis"
        if self.addresses[0].path:
            scheme = "unix"
        return f"{scheme}://{','.join(map(str, self.addresses))}"


def parse_url(url: str, where: str, default_port: int) -> Servers:
    """Parse ``redis://host:port,host:port``. Raises ``ConfigError``, which shows no secret."""
    scheme, mark, rest = url.partition("://")
    if not mark or scheme not in SCHEMES:
        raise _refused(url, where, f"must begin with one of {', '.join(SCHEMES)} and ://")
    if "@" in rest:
        raise _refused(
            url,
            where,
            "holds a user or a password, which logs would show. Remove them, and set username "
            "and password_file or password_env",
        )
    if scheme == "unix":
        if not rest.startswith("/"):
            raise _refused(url, where, "must have a full path: unix:///run/valkey.sock")
        return Servers((Address("", 0, rest),), is_tls=False)
    names = rest.removesuffix("/")
    if any(mark in names for mark in "/?#"):
        raise _refused(
            url, where, "has more than hosts and ports. Use the options, such as db, instead"
        )
    found = {_address(name, url, where, default_port) for name in names.split(",")}
    return Servers(tuple(sorted(found)), is_tls=scheme in _TLS_SCHEMES)


def _address(name: str, url: str, where: str, default_port: int) -> Address:
    try:
        parts = urlsplit(f"//{name.strip()}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or port == 0:
        raise _refused(
            url, where, "must name hosts, and ports from 1 to 65535: redis://kv1:6379,kv2:6379"
        )
    return Address(host, port or default_port)


def _refused(url: str, where: str, remedy: str) -> ConfigError:
    may_hold_a_secret = any(mark in url for mark in "@?")
    value = "(not shown)" if may_hold_a_secret else shown(url)
    return refusal("url", f"{where}: url={value} {remedy}.")


_VARIABLE: Final = re.compile(r"[A-Z_][A-Z0-9_]*")
_OPTIONS: Final = ("password_file", "password_env", "password_command")


@dataclass(frozen=True)
class Credentials:
    """The user name and the source of the password."""

    username: str | None = None
    source: str = ""  #: where the password comes from, for logs; empty if there is none
    _read: Callable[[], str] | None = field(default=None, repr=False)
    _command: SecretCommand | None = field(default=None, repr=False)

    def on_refused(self) -> None:
        """Note that a server has refused the password."""
        if self._command is not None:
            self._command.forget()

    def password(self) -> str | None:
        """Read the password; None if none is needed. May block. Raises ``StoreFault``."""
        if self._read is None:
            return None
        try:
            return _one_line(self._read())
        except (OSError, ValueError) as problem:
            raise StoreFault(f"{self.source} gives no password ({_reason(problem)})") from None


def read_credentials(reader: Options, username: str | None) -> Credentials:
    """Read the named credentials once. Raises ``ConfigError``, which shows no password."""
    if reader.has("password"):
        raise refusal(
            "password",
            f"{reader.where}: password=(not shown) would be shown in logs. Remove it, and name a "
            "file of mode 0600 that holds it in password_file, an environment variable in "
            "password_env, or a command that prints it in password_command.",
        )
    given = [key for key in _OPTIONS if reader.has(key)]
    if len(given) > 1:
        raise reader.error(given[1], "...", f"excludes {given[0]}. Give one of them")
    if not given:
        if username is not None:
            raise reader.error(
                "username", username, f"needs a password. Set one of {', '.join(_OPTIONS)}"
            )
        return Credentials()
    (key,) = given
    named = reader.text(key)
    # If users write the password itself where its name belongs, it must not reach a log.
    is_name = bool(_VARIABLE.fullmatch(named)) if key == "password_env" else "/" in named
    shown = named if is_name else "..."
    command = SecretCommand(named) if key == "password_command" else None
    read: Callable[[], str]
    if command is not None:
        read = command
    elif key == "password_file":
        read = partial(read_secret_file, reader.path(key))
    else:
        read = partial(_variable, named)
    try:
        _one_line(read())
    except (OSError, ValueError) as problem:
        raise reader.error(key, shown, f"gives no password ({_reason(problem)})") from None
    return Credentials(username, f"{key} {shown}", read, command)


def _variable(name: str) -> str:
    return os.environ.get(name, "")


def _reason(problem: Exception) -> str:
    return getattr(problem, "strerror", None) or str(problem)


def _one_line(text: str) -> str:
    password = text.strip("\r\n")
    if not password:
        raise ConfigError("it is empty or not set")
    return password


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
    """type of the servers in `url`: one server, nodes of a cluster, or sentinels"""
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
    """the tier's own certificate (PEM), for servers that require one"""
    tls_key_file: option.ReadApart[str | None] = None
    """the key of `tls_cert_file` (PEM)"""
    tls_check_hostname: option.Flag = True
    """refuse a server whose certificate has another name than that by which it was reached"""
    ttl_s: Annotated[option.WholeSeconds, Meta(le=1 << 31)] = 0
    """seconds after which the server drops a block; 0: never"""
    presence_ttl_s: option.Seconds = 60.0
    """time for which a block that was stored or found is assumed to exist; the server may evict
    it"""
    connections_max: Annotated[option.Integer, Meta(ge=2, le=1024)] = 8
    """connections to each server; half of them, at most, store"""
    connect_timeout_s: Annotated[option.Seconds, Meta(le=3600.0)] = 2.0
    """longest time to connect"""
    call_timeout_s: Annotated[option.Seconds, Meta(le=3600.0)] = 10.0
    """longest time of one call, including the wait for a connection; the tier's own timeouts may
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
