"""Tries the tier's operations with a store, once and step by step: for ``kvtier check``."""

from __future__ import annotations

import mmap
import secrets
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from kvtier.errors import StoreFault
from kvtier_backends.mooncake.client import Parts, StoreClient
from kvtier_backends.mooncake.connection import knock
from kvtier_backends.mooncake.library import FULL_CODES, MASTER_CODES, told
from kvtier_backends.mooncake.registered import RegisteredRegion, address_of

if TYPE_CHECKING:
    from kvtier.plugin_api.options import Options
    from kvtier_backends.mooncake.mooncake_options import MooncakeOptions

NAMESPACE: Final = "kvtier-check"
BODY_BYTES: Final = 4096
SEGMENT_BYTES_MAX: Final = 64 << 20
"""Others may store there while the check runs, and lose those objects: the less, the better."""


def try_store(
    library: Any,  # noqa: ANN401 - a module without types
    given: MooncakeOptions,
    reader: Options,
    *,
    read_only: bool,
) -> str:
    """Return a summary of the successful steps. Raises ``ConfigError`` for a failed one."""
    lent = min(given.segment_bytes, SEGMENT_BYTES_MAX)
    step = "reaching the master"
    remedy = "Start the master, or let this host reach it"
    client = None
    try:
        host = given.local_hostname or knock(given)
        step, remedy = "setting a client up", "See to local_hostname, metadata_server and protocol"
        modest = replace(given, segment_bytes=lent, ssd_offload_path=None)
        client = StoreClient(library, modest, host)
        room = memoryview(mmap.mmap(-1, BODY_BYTES))
        client.register(RegisteredRegion(address_of(room), BODY_BYTES))
        if read_only:
            return "its master was reached"
        remedy = "See to the master and to those who give the store memory"
        parts = Parts([(_name(given), [address_of(room)], [BODY_BYTES])])
        body = room[:] = secrets.token_bytes(BODY_BYTES)
        step = "storing an object"
        _expect(client.put(parts), 0)
        room[:] = bytes(BODY_BYTES)
        step = "loading it"
        _expect(client.get(parts), BODY_BYTES)
        if room != body:
            raise StoreFault("the store did not keep the stored block")  # noqa: TRY301 - as above
        step = "removing it"
        _expect(client.remove(parts.names), 0)
    except StoreFault as problem:
        raise reader.error(
            "master", given.master, f"was tried: {step} failed ({problem}). {remedy}"
        ) from problem
    finally:
        if client is not None:
            client.end()
    return "its master was reached; an object was stored, loaded and removed"


def _name(given: MooncakeOptions) -> str:
    return f"{given.key_prefix}/{NAMESPACE}/{secrets.token_hex(16)}"


def _expect(codes: list[int], wanted: int) -> None:
    (code,) = codes
    if code == wanted:
        return
    if code in FULL_CODES:
        raise StoreFault(f"no process gives the store memory, or it is full: {told(code)}")
    lost = "the master does not answer: " if code in MASTER_CODES else ""
    raise StoreFault(f"{lost}{told(code)}")
