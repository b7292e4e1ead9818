"""Parses the addresses in a ``url``: of servers, of a cluster's nodes or of sentinels.

A url must not hold a user and a password, because it is shown in logs and refusals.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import urlsplit

from kvtier.plugin_api.options import refusal, shown

if TYPE_CHECKING:
    from kvtier.errors import ConfigError

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
