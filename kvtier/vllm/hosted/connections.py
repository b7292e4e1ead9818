"""Closes connections of vLLM's ``p2p`` tier so that the tier can still open new ones.

vLLM ends a connection by closing the reader of its events, and then the connection itself. libzmq
waits until an event is read, in the one thread that serves all connections. So an event between
the two blocks all connections permanently, and the tier can neither reach peers nor be reached
(libzmq#3575; seen with a peer that was killed and restarted). So events are disabled first.

If a peer is absent, libzmq retries forever, also for connections that vLLM has ended. After its
restart the peer would first get messages from those. All have one name, and the peer listens to
only one: maybe not the one in use. So a connection is tried once, as vLLM expects (it abandons a
refused one at once), and messages still queued on an ended one are dropped soon.

vLLM's tier notes the seed of its engine's block hashes with its first connection, and compares it
with the peer's. Here a peer may connect while the engine is still starting and has drawn no seed:
a seed noted then would have every peer refused for the engine's lifetime.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

import zmq
from vllm.v1.core.kv_cache_utils import get_none_hash_seed

from kvtier.vllm.identity.sharing import SEED_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.v1.kv_offload.tiering.p2p.control.zmq import ZmqConnection, ZmqTransport
    from vllm.v1.kv_offload.tiering.p2p.manager import P2PSecondaryTierManager

LAST_WORDS_MS: Final = 1000
"""How long an ended connection may take to send its queued messages."""

NEVER: Final = -1


def end_well(control: ZmqTransport) -> None:
    """Make all connections opened from now on close without harm to others."""
    context = control._zmq_ctx  # noqa: SLF001 - no other way, here and below
    context.setsockopt(zmq.LINGER, LAST_WORDS_MS)
    context.setsockopt(zmq.RECONNECT_IVL, NEVER)
    real = control._open_connection  # noqa: SLF001

    def opened(peer_id: str, direction: str = "outbound") -> ZmqConnection:
        connection = real(peer_id, direction)
        connection.close = _without_events(connection)
        return connection

    control._open_connection = opened  # noqa: SLF001


def _without_events(connection: ZmqConnection) -> Callable[[], None]:
    real: Callable[[], None] = connection.close
    dealer = connection._sockets.dealer  # noqa: SLF001

    def close() -> None:
        if not dealer.closed:
            dealer.disable_monitor()
        real()

    return close


def note_no_seed_too_early(tier: P2PSecondaryTierManager) -> None:
    """Make the tier look up the seed of the engine's block hashes for each connection."""
    tier._get_hash_seed = _hash_seed  # noqa: SLF001 - as above


def _hash_seed() -> str:
    set_for_all = os.environ.get(SEED_VARIABLE)
    return str(get_none_hash_seed()) if set_for_all is None else set_for_all
