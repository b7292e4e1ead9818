"""A small S3 server that misbehaves on command: what moto cannot be brought to do.

It speaks HTTP on loopback, keeps objects in memory, and knows what the tier sends: GET, HEAD,
PUT with ``If-None-Match``, and the removal of several objects at once. It checks no signature.
"""

from __future__ import annotations

import json
import re
import socket
import struct
import sys
import threading
from contextlib import contextmanager
from enum import Enum, auto
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from tests.support.patience import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

_OF_METADATA = "x-amz-meta-"
OF_BLOCKS = re.compile(r"/[0-9a-f]{3}/[0-9a-f]+$")


class Fault(Enum):
    """What happens to a request instead of an answer."""

    SLOW_DOWN = auto()
    TOO_MANY = auto()  #: 429
    ERROR = auto()  #: 500
    NOT_IMPLEMENTED = auto()  #: 501, of a put with a condition
    TIMED_OUT = auto()  #: 400: the server has waited for the request
    HALF_A_BODY = auto()  #: 400: the server has not got all of it
    EXPIRED = auto()  #: 400: the session token is too old
    SKEWED = auto()  #: 403: this host's clock is another than the server's
    UNKNOWN_KEY = auto()  #: 403: the access key is nobody's, or nobody's by now
    DENIED = auto()
    OUT_OF_ROOM = auto()  #: 507
    QUOTA = auto()  #: 403, as Ceph says that a quota is exceeded
    CONFLICT = auto()  #: 409
    NO_BUCKET = auto()
    HANG = auto()  #: nothing is answered until ``release``
    RESET = auto()  #: half of a body, then the connection is reset
    SHORT = auto()  #: half of a body, then the connection ends
    SHORTENED = auto()  #: half of the object, as if that were all
    LONG = auto()  #: more than the object, as if that were it
    CHANGED = auto()  #: a bit is another


_ANSWERS = {
    Fault.SLOW_DOWN: (503, "SlowDown"),
    Fault.TOO_MANY: (429, "TooManyRequests"),
    Fault.ERROR: (500, "InternalError"),
    Fault.NOT_IMPLEMENTED: (501, "NotImplemented"),
    Fault.TIMED_OUT: (400, "RequestTimeout"),
    Fault.HALF_A_BODY: (400, "IncompleteBody"),
    Fault.EXPIRED: (400, "ExpiredToken"),
    Fault.SKEWED: (403, "RequestTimeTooSkewed"),
    Fault.UNKNOWN_KEY: (403, "InvalidAccessKeyId"),
    Fault.DENIED: (403, "AccessDenied"),
    Fault.OUT_OF_ROOM: (507, "InsufficientStorage"),
    Fault.QUOTA: (403, "QuotaExceeded"),
    Fault.CONFLICT: (409, "ConditionalRequestConflict"),
    Fault.NO_BUCKET: (404, "NoSuchBucket"),
}


class FaultServer:
    """What the server has, and what it is told to do."""

    def __init__(self, objects_max: int | None = None) -> None:
        """``objects_max``: so many it keeps, as a lifecycle rule does; the oldest go."""
        self.objects: dict[str, bytes] = {}
        self.metadata: dict[str, dict[str, str]] = {}  #: headers, by path
        self.requests: list[tuple[str, str]] = []  #: method and path of all that came
        self.keys: list[str] = []  #: ids of the access keys by which they were signed
        self.expired: set[str] = set()  #: ids of access keys that are too old
        self._objects_max = objects_max
        self.running_max = 0  #: so many requests for blocks have run at once
        self._running = 0
        self._faults: list[tuple[Fault, str, int]] = []
        self._lock = threading.Lock()
        self._gate = threading.Event()
        self.is_hanging = threading.Event()

    def misbehave(self, fault: Fault, methods: str = "", *, times: int = 1 << 30) -> None:
        """Answer the next requests for blocks so; ``methods`` none: those of any method."""
        with self._lock:
            self._gate.clear()
            self._faults.append((fault, methods, times))

    def misbehave_always(self, fault: Fault) -> None:
        """Answer each request so, those for the description, too."""
        self.misbehave(fault, "ALL")

    def behave(self) -> None:
        """Answer as one should from now on; what hangs is released."""
        with self._lock:
            self._faults.clear()
        self._gate.set()
        self.is_hanging.clear()

    def count(self, method: str) -> int:
        """Return how many requests for blocks have come."""
        return sum(m == method and bool(OF_BLOCKS.search(path)) for m, path in self.requests)

    def begin(self, method: str, path: str) -> Fault | None:
        """Note a request, and return what is to happen to it."""
        with self._lock:
            self.requests.append((method, path))
            self._forget_old()
            if OF_BLOCKS.search(path):
                self._running += 1
                self.running_max = max(self.running_max, self._running)
            for index, (fault, methods, times) in enumerate(self._faults):
                if methods == "ALL" or (
                    OF_BLOCKS.search(path) and (not methods or method in methods.split())
                ):
                    self._faults[index] = (fault, methods, times - 1)
                    if times == 1:
                        del self._faults[index]
                    return fault
        return None

    def _forget_old(self) -> None:
        if self._objects_max is not None and len(self.objects) > self._objects_max:
            oldest = next(path for path in self.objects if OF_BLOCKS.search(path))
            self.objects.pop(oldest, None)
            self.metadata.pop(oldest, None)
            del self.requests[:-1], self.keys[:-1]

    def end(self, path: str) -> None:
        """Note that a request is over."""
        if OF_BLOCKS.search(path):
            with self._lock:
                self._running -= 1

    def hang(self) -> None:
        """Wait until the server behaves again."""
        self.is_hanging.set()
        self._gate.wait(PATIENCE_S)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    state: FaultServer

    def log_message(self, *args: Any) -> None:
        """Say nothing of each request."""

    def _handle(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = self.path.partition("?")[0]
        signed = re.search(r"Credential=([^/]+)/", self.headers.get("Authorization") or "")
        key = signed[1] if signed else ""
        self.state.keys.append(key)
        fault = self.state.begin(self.command, path)
        if key in self.state.expired:
            fault = Fault.EXPIRED
        try:
            if fault is Fault.HANG:
                self.state.hang()
                self.close_connection = True
            elif fault in _ANSWERS and self._concerns(fault):
                status, code = _ANSWERS[fault]
                self._answer(status, f"<Error><Code>{code}</Code></Error>".encode())
            else:
                _METHODS[self.command](self, path, body, fault)
        finally:
            self.state.end(path)

    do_GET = do_HEAD = do_PUT = do_POST = _handle  # noqa: N815 - names of the base class

    def _concerns(self, fault: Fault) -> bool:
        return fault is not Fault.NOT_IMPLEMENTED or "If-None-Match" in self.headers

    def _put(self, path: str, body: bytes, fault: Fault | None) -> None:
        del fault
        if path in self.state.objects and self.headers.get("If-None-Match") == "*":
            self._answer(412, b"<Error><Code>PreconditionFailed</Code></Error>")
            return
        self.state.objects[path] = body
        headers = self.headers.items()
        self.state.metadata[path] = {k: v for k, v in headers if k.startswith(_OF_METADATA)}
        self._answer(200)

    def _get(self, path: str, body: bytes, fault: Fault | None) -> None:
        del body
        there, headers = self.state.objects.get(path), self.state.metadata.get(path, {})
        if there is None:
            self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
        elif fault in (Fault.RESET, Fault.SHORT):
            self._answer(200, there, sent=len(there) // 2, headers=headers)
            self._break(reset=fault is Fault.RESET)
        else:
            self._answer(200, _altered(there, fault), headers=headers)

    def _remove(self, path: str, body: bytes, fault: Fault | None) -> None:
        del fault
        keys = re.findall(r"<Key>([^<]*)</Key>", body.decode())
        for key in keys:
            self.state.objects.pop(f"{path.rstrip('/')}/{key}", None)
        deleted = "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in keys)
        self._answer(200, f"<DeleteResult>{deleted}</DeleteResult>".encode())

    def _answer(
        self,
        status: int,
        body: bytes = b"",
        *,
        sent: int | None = None,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", '"e"')
        self.send_header("Last-Modified", "Tue, 24 Nov 2026 00:00:00 GMT")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[:sent])

    def _break(self, *, reset: bool) -> None:
        self.wfile.flush()
        if reset:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True


_METHODS: dict[str, Callable[[_Handler, str, bytes, Fault | None], None]] = {
    "GET": _Handler._get,
    "HEAD": _Handler._get,
    "PUT": _Handler._put,
    "POST": _Handler._remove,
}


def _altered(there: bytes, fault: Fault | None) -> bytes:
    if fault is Fault.SHORTENED:
        return there[: len(there) // 2]
    if fault is Fault.LONG:
        return there + b"more"
    if fault is Fault.CHANGED:
        return bytes([there[0] ^ 1]) + there[1:]
    return there


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of connections that the client has closed, or this server has reset."""


@contextmanager
def fault_server(objects_max: int | None = None) -> Iterator[tuple[FaultServer, str]]:
    """Run a server until the end of the block, and return it with its address."""
    state = FaultServer(objects_max)
    server = _Server(("127.0.0.1", 0), type("_Bound", (_Handler,), {"state": state}))
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), name="s3-fault-server")
    thread.start()
    try:
        yield state, f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        state.behave()
        server.shutdown()
        thread.join(PATIENCE_S)
        server.server_close()


def main(job: dict[str, int]) -> Iterator[int | None]:
    """Be one beside a soak: give its port, then have the faults of each order."""
    with fault_server(job["objects_max"]) as (running, address):
        yield int(address.rpartition(":")[2])
        for line in sys.stdin:
            running.behave()
            running.expired.clear()
            for word in json.loads(line)["faults"]:  # ``FAULT:METHODS``, or ``expired:KEY``
                name, _, of = word.partition(":")
                if name == "expired":
                    running.expired.add(of)
                else:
                    running.misbehave(Fault[name], of)
            yield None
