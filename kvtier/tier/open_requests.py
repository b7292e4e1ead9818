"""Tracks the running requests of a request-scoped backend (``BackendTraits.request_scoped``)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec

from kvtier.core import wire
from kvtier.plugin_api.backend import Loaded, Outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvtier.core.wire import Message
    from kvtier.plugin_api.backend import Backend, LoadBlock, ServedRequest, StoreBlock
    from kvtier.plugin_api.keys import RequestId


OF_REQUESTS: Final = (wire.RequestOpened, wire.RequestClosed, wire.PrefixHits, wire.BlocksMissing)
"""The messages about requests that go to a backend."""


class Serving(Protocol):
    """The methods that a driver needs of a backend, or of one request at it."""

    async def probe(self, keys: Sequence[bytes]) -> Sequence[bool]:
        """As ``Backend.probe``."""
        ...

    async def load(self, blocks: Sequence[LoadBlock]) -> Sequence[Loaded]:
        """As ``Backend.load``."""
        ...

    async def store(self, blocks: Sequence[StoreBlock]) -> Sequence[Outcome]:
        """As ``Backend.store``."""
        ...


class _Nobody:
    """Serves a request that the backend does not know, or that is over: with nothing."""

    async def probe(self, keys: Sequence[bytes]) -> Sequence[bool]:
        return [False] * len(keys)

    async def load(self, blocks: Sequence[LoadBlock]) -> Sequence[Loaded]:
        return [Loaded(Outcome.ABSENT)] * len(blocks)

    async def store(self, blocks: Sequence[StoreBlock]) -> Sequence[Outcome]:
        return [Outcome.ABSENT] * len(blocks)


class OpenRequests:
    """Begins and ends requests at the backend. Loop thread only."""

    def __init__(
        self,
        backend: Backend,
        report: Callable[[Message], object],
        raised: Callable[[BaseException, str], None],
    ) -> None:
        """``report``: sends to the tier's actor. ``raised``: called with the backend's errors."""
        self._backend = backend
        self._report = report
        self._raised = raised
        self.are_apart = backend.traits.request_scoped  #: else the backend serves all alike
        self._nobody = _Nobody()
        self._open: dict[RequestId, ServedRequest] = {}

    def serving(self, request: RequestId) -> Serving:
        """Return the target of a request's calls."""
        return self._open.get(request, self._nobody) if self.are_apart else self._backend

    def want(self, request: RequestId, keys: Sequence[bytes], served: ServedRequest) -> None:
        """Have blocks of the engine's memory sent to ``served``."""
        self._open[request] = served
        self._report(wire.BlocksWanted(request, tuple(keys)))

    def want_no_more(self, request: RequestId) -> None:
        """Discard any blocks that still come for this request, as soon as they come."""
        self._open.pop(request, None)

    async def receive(
        self,
        message: wire.RequestOpened | wire.RequestClosed | wire.PrefixHits | wire.BlocksMissing,
    ) -> None:
        """Begin or end a request, or notify it about its blocks."""
        try:
            if isinstance(message, wire.RequestOpened):
                params = msgspec.msgpack.decode(message.params, type=dict[str, Any])
                served = self._backend.begin_request(message.request, params)
                self._open[message.request] = served
            elif isinstance(message, wire.PrefixHits):
                storing = self._open.get(message.request)
                if storing is not None:
                    storing.prefix_hits(message.keys)
            elif isinstance(message, wire.BlocksMissing):
                wanting = self._open.get(message.request)
                if wanting is not None:
                    wanting.missing(message.keys)
            else:
                ended = self._open.pop(message.request, None)
                if ended is not None:
                    ended.end()
        except Exception as error:  # noqa: BLE001 - a backend may raise anything
            self._raised(error, type(message).__name__)
