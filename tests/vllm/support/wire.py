"""KV events on their way from vLLM's real publisher to a subscriber, as they travel."""

from __future__ import annotations

import uuid
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import zmq
from vllm.distributed.kv_events import KVEventBatch, ZmqEventPublisher

from tests.support.patience import PATIENCE_S, until

if TYPE_CHECKING:
    from collections.abc import Iterator


class Wire:
    """A publisher and its one subscriber."""

    def __init__(self, publisher: ZmqEventPublisher, socket: Any) -> None:
        self._publisher = publisher
        self._socket = socket
        self._decoder = msgspec.msgpack.Decoder(type=KVEventBatch)
        self._heard = -1  # the last batch's number

    def carry(self, events: list[Any]) -> list[Any]:
        """Publish the events of a step; return what the subscriber gets of them, in order."""
        if not events:
            return []
        self._publisher.publish(KVEventBatch(ts=0.0, events=events))
        _, number, payload = self._socket.recv_multipart()
        self._heard += 1
        assert int.from_bytes(number, "big") == self._heard, "a batch was lost"
        heard: list[Any] = self._decoder.decode(payload).events
        return heard

    @contextmanager
    def mute_subscriber(self) -> Iterator[None]:
        """Have one more that subscribes, and reads nothing."""
        socket: Any
        with zmq.Context.instance().socket(zmq.SUB) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RCVHWM, 1)
            socket.setsockopt(zmq.SUBSCRIBE, b"")
            socket.connect(self._publisher._endpoint)
            yield

    def join(self) -> None:
        """Publish until the subscription has reached the publisher; hear the last of it."""
        published = 0

        def is_heard() -> bool:
            nonlocal published
            self._publisher.publish(KVEventBatch(ts=0.0, events=[]))
            published += 1
            return bool(self._socket.poll(0))

        until(is_heard)
        while self._heard < published - 1:  # not by the clock: the publisher's thread may be late
            _, number, _ = self._socket.recv_multipart()
            self._heard = int.from_bytes(number, "big")


@contextmanager
def open_wire() -> Iterator[Wire]:
    """Open vLLM's publisher, within this process, and subscribe to it."""
    endpoint = f"inproc://kv-events-{uuid.uuid4()}"
    publisher = ZmqEventPublisher(0, endpoint=endpoint)
    socket: Any
    try:
        with zmq.Context.instance().socket(zmq.SUB) as socket:
            socket.setsockopt(zmq.RCVTIMEO, int(PATIENCE_S * 1000))
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.SUBSCRIBE, b"")
            socket.connect(endpoint)
            carrying = Wire(publisher, socket)
            carrying.join()
            yield carrying
    finally:
        publisher.shutdown()
