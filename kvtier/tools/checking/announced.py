"""Finds addresses that a tier announces but that other engines can't reach.

An engine starts with any address; only the others notice, by misses, that they can't reach it.
"""

from __future__ import annotations

import ipaddress
import os
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from kvtier.errors import ConfigError
from kvtier.plugin_api.options import Options, shown
from kvtier.tools.checking.findings import Finding
from kvtier.tools.checking.rules import UNREACHABLE_ADDRESS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvtier.settings.runtime_config import TierConfig

P2P_HOST_ENV: Final = "VLLM_P2P_SIDE_CHANNEL_HOST"
"""Holds the host that vLLM's ``p2p`` tier announces if none is given; unset: localhost."""

LOOPBACK: Final = "by which a host reaches itself only"


def doubts_of_address(config: TierConfig) -> Iterator[Finding]:
    """Yield warnings about the address that a tier announces."""
    for key, given, host in _announced(config):
        why = why_unreachable(host)
        if why is not None:
            yield Finding(
                UNREACHABLE_ADDRESS,
                f"{key}{given} is the address that other engines get, {why}.",
                f"Set {key} to an address of this host that they reach, unless all of them run on "
                "this host.",
            )


def _announced(config: TierConfig) -> Iterator[tuple[str, str, str]]:
    """Yield the key of an address, its value, and the host in that."""
    options = config.options
    inner = options.get("tier")
    if config.type == "vllm" and isinstance(inner, dict) and inner.get("type") == "p2p":
        host = inner.get("host")
        if host is None:
            default = os.environ.get(P2P_HOST_ENV, "localhost")
            yield "host", f" (not given, and {default!r} by {P2P_HOST_ENV} here)", default
        else:
            yield "host", f"={shown(host)}", str(host)
    elif config.type == "mooncake" and options.get("local_hostname") is not None:
        yield (
            "local_hostname",
            f"={shown(options['local_hostname'])}",
            host_of(str(options["local_hostname"])),
        )
    elif config.type == "mooncake" and _gives_memory(config):
        master = str(options.get("master"))
        nearest = host_of(master.rpartition("://")[2].partition(";")[0])
        yield "local_hostname", f" (not given, and as master={master!r} has it)", nearest


def _gives_memory(config: TierConfig) -> bool:
    with suppress(ConfigError):
        return Options(config.options, "").size("segment_bytes", 0) > 0
    return False


def host_of(address: str) -> str:
    """Return the host of an address, which may have a port."""
    if address.startswith("["):
        return address[1:].partition("]")[0]
    host, _, port = address.rpartition(":")
    return host if host and ":" not in host and port.isdecimal() else address


def why_unreachable(host: str) -> str | None:
    """Return the reason why others can't reach a host; None if they may."""
    name = host.lower().rstrip(".")
    if name == "localhost" or name.endswith((".localhost", "localhost.localdomain")):
        return LOOPBACK
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:  # a name
        return None
    address = getattr(address, "ipv4_mapped", None) or address
    if address.is_unspecified:
        return "and no address at all: it stands for all that a host has"
    if address.is_loopback:
        return LOOPBACK
    return "which routers do not pass on (link-local)" if address.is_link_local else None
