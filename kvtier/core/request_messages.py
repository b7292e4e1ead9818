"""Defines messages about requests: from the facade, and to request-scoped tiers.

Such a tier (``BackendTraits.request_scoped``) is asked for the blocks that one request may have,
and given those it stores. It is notified of requests with parameters for it, and no others.
"""

from __future__ import annotations

from kvtier.core.message import Message
from kvtier.plugin_api.keys import Key, RequestId, TierSet  # noqa: TC001 - msgspec decodes by them

# --- facade → primary tier ---


class RequestStarted(Message, frozen=True, gc=False):
    """A request begins; only ``tiers`` may be asked for its blocks.

    ``params``: for request-scoped tiers, as MessagePack; if empty, those are not notified.
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
    """The loads of these requests are decided: they wait for nothing any more."""

    requests: tuple[RequestId, ...]


# --- primary tier → links → tiers → backends ---


class RequestOpened(Message, frozen=True, gc=False):
    """A request runs that has ``params`` (MessagePack) for request-scoped tiers.

    Sent before all else of the request. ``peer``: as in RequestStarted.
    """

    request: RequestId
    params: bytes
    peer: str = ""


class RequestClosed(Message, frozen=True, gc=False):
    """A request that was opened sends nothing more."""

    request: RequestId


class TierIsRequestScoped(Message, frozen=True, gc=False):
    """The tier serves requests that have parameters for it, and no others. Link → primary tier."""

    tier: int


class PrefixHits(Message, frozen=True, gc=False):
    """These blocks of the request were in host memory before it. Sent before their StoreJob.

    Only for a tier that wants all blocks of the request.
    """

    request: RequestId
    keys: tuple[Key, ...]


# --- blocks that a backend wants, for another engine's request ---


class BlocksWanted(Message, frozen=True, gc=False):
    """A backend wants these for ``request``, one of its own. Tier → link → primary tier.

    READY blocks come as a StoreJob of that request, so that they stay while they are read; the
    others come as BlocksMissing. ``since``: the epoch in which the keys' generation began.
    """

    request: RequestId
    keys: tuple[Key, ...]
    since: int = 0
    tier: int = -1  #: the tier's number, set by its link


class BlocksMissing(Message, frozen=True, gc=False):
    """These will not come for ``request``. Goes the way back, to the backend."""

    request: RequestId
    keys: tuple[Key, ...]
