"""What a request brings along for tiers that go by request: its ``kv_transfer_params``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from kvtier.plugin_api.log import log

if TYPE_CHECKING:
    from collections.abc import Mapping


def packed_params(params: Mapping[str, Any]) -> bytes:
    """Return the parameters as MessagePack; nothing for those that are no plain data."""
    try:
        return msgspec.msgpack.encode(params)
    except (TypeError, ValueError, OverflowError) as error:
        log.warning("a request's kv_transfer_params are no plain data", error=str(error))
        return b""
