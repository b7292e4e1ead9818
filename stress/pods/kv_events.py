"""Subscribes to the KV events that an engine's pod publishes, as a router does."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import msgspec
import zmq

from stress.pods.substitutions import ADDRESS, addressed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stress.pods.manifests import Pod

OPTION: Final = "--kv-events-config"
MEDIUM: Final = "STORAGE"  #: of a disk tier's blocks


class Subscriber:
    """Collects what one engine announces on the manifest's topic."""

    def __init__(self, socket: Any, topic: str) -> None:  # noqa: ANN401 - zmq's
        from vllm.distributed.kv_events import KVEventBatch  # noqa: PLC0415 - imports torch

        self.topic = topic
        self._socket = socket
        self._decoder = msgspec.msgpack.Decoder(type=KVEventBatch)
        self._stored: set[object] = set()

    def stored(self) -> set[object]:
        """Return the hashes of the blocks announced so far as stored in the tier."""
        while self._socket.poll(0):
            for event in self._decoder.decode(self._socket.recv_multipart()[-1]).events:
                if type(event).__name__ == "BlockStored" and event.medium == MEDIUM:
                    self._stored.update(event.block_hashes)
        return self._stored


@contextmanager
def subscriber(pod: Pod) -> Iterator[Subscriber | None]:
    """Subscribe until the end of the block; None if the pod publishes nothing.

    Subscribed before the engine starts: what is announced without a subscriber is lost.
    """
    if OPTION not in pod.arguments:
        yield None
        return
    config = pod.json_argument(OPTION)
    port = config["endpoint"].rpartition(":")[2]
    topic = addressed(config["topic"])
    socket: Any
    with zmq.Context.instance().socket(zmq.SUB) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SUBSCRIBE, topic.encode())
        socket.connect(f"tcp://{ADDRESS}:{port}")
        yield Subscriber(socket, topic)
