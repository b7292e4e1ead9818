"""Serves HTTP on loopback, in this process."""

from __future__ import annotations

from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import TYPE_CHECKING

from tests.support.patience import POLL_S
from tests.support.server_program import HOST

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def http_server(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """Serve until the block ends; its value is host:port.

    Left to itself, ``socketserver`` looks twice a second whether it is to end, which is waited for.
    """
    server = ThreadingHTTPServer((HOST, 0), handler)
    thread = Thread(target=server.serve_forever, args=(POLL_S,))
    thread.start()
    try:
        yield f"{HOST}:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
