"""Ports of servers that a soak starts, and that nobody else gets meanwhile."""

from __future__ import annotations

import socket
from typing import Final

HOST: Final = "127.0.0.1"


class HeldPort:
    """A port on loopback. Until ``release`` no other process is given it.

    It is bound here, without listening: connections are refused until a server listens there,
    which it may since it sets ``SO_REUSEADDR``, as this one does once it has the port.
    """

    def __init__(self) -> None:
        self._socket = socket.socket()
        self._socket.bind((HOST, 0))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.number: int = self._socket.getsockname()[1]

    def release(self) -> None:
        """Give the port away."""
        self._socket.close()
