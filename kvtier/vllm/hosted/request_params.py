"""Reads a request's ``kv_transfer_params``, which request-scoped tiers use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from kvtier.plugin_api.log import log, printable

ADDRESS_CHARACTERS_MAX: Final = 300
"""A host name has 253 at most. Longer text is arbitrary, and not an address."""


def packed_params(params: Mapping[str, Any]) -> bytes:
    """Return the parameters as MessagePack; empty if they are not plain data."""
    try:
        return msgspec.msgpack.encode(params)
    except (TypeError, ValueError, OverflowError) as error:
        log.warning("a request's kv_transfer_params are not plain data", error=str(error))
        return b""


def source_of(params: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the entry that names the engine that the request loads from; empty if none does."""
    source = params.get("remote_prefiller") or params.get("remote_kv_source")
    return source if isinstance(source, Mapping) else {}


def peer_of(params: Mapping[str, Any]) -> str:
    """Return the address of that engine; empty if there is none."""
    source = source_of(params)
    host, port = source.get("remote_host"), source.get("remote_port")
    return printable(f"{host}:{port}")[:ADDRESS_CHARACTERS_MAX] if host and port else ""
