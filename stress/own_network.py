"""Gives a process a network namespace of its own. There is nothing in it but ``lo``."""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
from typing import Final

_NEW_NETWORK: Final = 0x40000000  # CLONE_NEWNET
_UP: Final = 0x1  # IFF_UP
_GET_FLAGS, _SET_FLAGS = 0x8913, 0x8914  # SIOCGIFFLAGS, SIOCSIFFLAGS


def enter_own_network() -> None:
    """Move the calling thread there, and all that it starts from now on. Raises ``OSError``."""
    if ctypes.CDLL(None, use_errno=True).unshare(_NEW_NETWORK):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    _bring_lo_up()


def _bring_lo_up() -> None:
    names = [name for _, name in socket.if_nameindex()]
    assert names == ["lo"], f"this is no new namespace: {names}"
    with socket.socket() as any_socket:
        asked = struct.pack("16sH22x", b"lo", 0)
        _, flags = struct.unpack("16sH22x", fcntl.ioctl(any_socket, _GET_FLAGS, asked))
        fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sH22x", b"lo", flags | _UP))
