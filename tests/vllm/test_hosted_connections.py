"""Connections of vLLM's ``p2p`` tier that end leave it able to reach others, and to end itself."""

from __future__ import annotations

import socket
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_offload.tiering.p2p.control.zmq import ZmqTransport

from kvtier.vllm.hosted.connections import end_well
from tests.support.patience import until
from tests.support.server_program import HOST, free_port

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def control(port: int | None = None) -> Iterator[ZmqTransport]:
    """What a tier of an engine's talks to peers with."""
    port = port or free_port()
    made = ZmqTransport(f"{HOST}:{port}", HOST, port)
    end_well(made)
    ending = threading.Thread(target=made.close, daemon=True)  # libzmq may wait without end
    try:
        yield made
    finally:
        ending.start()
        until(lambda: not ending.is_alive())


def heard(by: ZmqTransport, of: ZmqTransport) -> list[Any]:
    """Wait until one has heard of the other, and return what."""
    messages: list[Any] = []

    def has_come() -> bool:
        of.poll()
        by.poll()
        for connection in by._connections.values():
            messages.extend(connection.recv())
        return bool(messages)

    until(has_come)
    return messages


class Reader:
    """What reads the events of a connection. When it is closed, the peer goes, and that is seen."""

    def __init__(self, real: Any, peer: socket.socket) -> None:
        self._real = real
        self._peer = peer

    def close(self) -> None:
        self._real.close()
        self._peer.shutdown(socket.SHUT_WR)
        until(self._is_noticed)

    def _is_noticed(self) -> bool:
        try:
            return self._peer.recv(4096) == b""
        except BlockingIOError:
            return False


def test_a_peer_that_goes_while_its_connection_is_ended_stops_no_other() -> None:
    """Nobody reads the events of that connection any more. libzmq would wait until they are."""
    with control() as one, control() as other, socket.create_server((HOST, 0)) as server:
        connection = one.connect(f"{HOST}:{server.getsockname()[1]}")
        peer, _ = server.accept()
        with peer:
            peer.setblocking(False)
            sockets = connection._sockets
            sockets.monitor = Reader(sockets.monitor, peer)
            connection.close()
        one.connect(other._local_id).send({"type": "hello"})
        assert heard(other, of=one) == [{"type": "hello"}]


def test_what_was_meant_for_a_peer_that_is_gone_its_next_life_does_not_hear() -> None:
    """Nor does it hold up the end of the tier."""
    with control() as one:
        port = free_port()
        for _ in range(3):
            connection = one.connect(f"{HOST}:{port}")
            connection.send({"type": "for an earlier life"})
            until(lambda connection=connection: one.poll() or not connection.alive)
            connection.close()
        with control(port) as next_life:
            one.connect(next_life._local_id).send({"type": "hello"})
            assert heard(next_life, of=one) == [{"type": "hello"}]
