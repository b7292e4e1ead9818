"""Messages about requests: from the facade, and to request-scoped tiers.

Such a tier (``BackendTraits.request_scoped``) is asked for what one request may have, and
given what that request stores. It is notified of requests with parameters for it, and no others.
"""

from __future__ import annotations

from kvtier.core.message import Message
from kvtier.plugin_api.keys import Key, RequestId, TierSet  # noqa: TC001 - msgspec decodes by them

# --- facade → primary tier ---


class RequestStarted(Message, frozen=True, gc=False):
    """A request begins; only ``tiers`` may be asked for its blocks.

    ``params``: for request-scoped tiers, as MessagePack; empty: those don't hear of it.
    ``peer``: the address of the engine that it loads from, if it names one.
    """

    request: RequestId
    tiers: TierSet
    params: bytes = b""
    peer: str = ""


class RequestFinished(Message, frozen=True, gc=False):
    """A request asks for nothing more. ``order``: all its keys, head to tail, if known."""

    request: RequestId
    order: tuple[Key, ...] | None


class RequestsScheduled(Message, frozen=True, gc=False):
    """It is decided what these requests load: they wait for nothing any more."""

    requests: tuple[RequestId, ...]


# --- primary tier → links → tiers → backends ---


class RequestOpened(Message, frozen=True, gc=False):
    """A request runs that has ``params`` (MessagePack) for request-scoped tiers.

    Before all else of the request. ``peer``: as RequestStarted.
    """

    request: RequestId
    params: bytes
    peer: str = ""


class RequestClosed(Message, frozen=True, gc=False):
    """Nothing more comes of a request that was opened."""

    request: RequestId


class TierIsRequestScoped(Message, frozen=True, gc=False):
    """The tier serves requests that have parameters for it, and no others. Link → primary tier."""

    tier: int


class PrefixHits(Message, frozen=True, gc=False):
    """These blocks of the request were in host memory before it. Before the StoreJob with them.

    Only a tier that wants all blocks of the request has any use for them.
    """

    request: RequestId
    keys: tuple[Key, ...]


# --- blocks that a backend wants, for a request of another engine's ---


class BlocksWanted(Message, frozen=True, gc=False):
    """A backend wants these for ``request``, which is of its own. Tier → link → primary tier.

    What is READY comes as a StoreJob of that request, so that it stays while it is read; of the
    others BlocksMissing tells. ``since``: the epoch in which the generation of the keys began.
    """

    request: RequestId
    keys: tuple[Key, ...]
    since: int = 0
    tier: int = -1  #: which, from its link on


class BlocksMissing(Message, frozen=True, gc=False):
    """These will not come for ``request``. By the way back, to the backend."""

    request: RequestId
    keys: tuple[Key, ...]
