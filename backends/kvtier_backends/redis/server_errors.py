"""What a server's errors mean, by the word that they begin with: for a block, and for the tier.

The words are those of Redis 7 and Valkey 8 that the commands of a tier can meet. An error that is
not listed is one of the block's alone, as ``ERR`` is.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import TYPE_CHECKING, Final, NamedTuple

from kvtier_backends.redis.resp import Kind

if TYPE_CHECKING:
    from kvtier_backends.redis.resp import Reply


class Meaning(Enum):
    """What a block is after its command was answered with an error."""

    FAILED = auto()
    FULL = auto()
    DAMAGED = auto()  #: something else has the block's name
    ABSENT = auto()  #: to whom loads it: its hash slot moves


class Route(Enum):
    """What the error says of the connection that it came over, and of the servers."""

    KEPT = auto()  #: nothing
    CHECKED = auto()  #: the servers may be others than the tier thinks
    LEFT = auto()  #: the server at its end is not, or no more, the one to ask: nor at all idle ones


class ServerError(NamedTuple):
    """A row of ``SERVER_ERRORS``."""

    meaning: Meaning = Meaning.FAILED
    route: Route = Route.KEPT
    refuses_writes: bool = False  #: and serves what it has
    remedy: str = ""  #: for the log


_REPLICA: Final = (
    "the server is a replica: it goes on by itself once the name that it was reached by leads to a "
    "master"
)

SERVER_ERRORS: Final[dict[str, ServerError]] = {
    "ERR": ServerError(),
    "OOM": ServerError(
        Meaning.FULL,
        refuses_writes=True,
        remedy="set the server's maxmemory-policy to allkeys-lru, or raise its maxmemory",
    ),
    "WRONGTYPE": ServerError(Meaning.DAMAGED),
    "READONLY": ServerError(route=Route.LEFT, refuses_writes=True, remedy=_REPLICA),
    "MASTERDOWN": ServerError(
        route=Route.LEFT,
        remedy="the server is a replica that has lost its master (replica-serve-stale-data no)",
    ),
    "LOADING": ServerError(route=Route.LEFT, remedy="the server loads its data after a start"),
    "NOREPLICAS": ServerError(
        refuses_writes=True,
        remedy="the server wants more replicas (min-replicas-to-write): see to them, or lower it",
    ),
    "MISCONF": ServerError(
        refuses_writes=True,
        remedy="the server can't save its data to its disk: see to that, or set its "
        "stop-writes-on-bgsave-error to no",
    ),
    "NOPERM": ServerError(
        refuses_writes=True,
        remedy="the ACL user lacks a right: kvtier check --connect says which",
    ),
    "NOAUTH": ServerError(route=Route.LEFT, remedy="the server wants a password by now"),
    "BUSY": ServerError(remedy="a script runs on the server: see to it, or run SCRIPT KILL there"),
    "CROSSSLOT": ServerError(remedy="it is a node of a cluster: set mode to 'cluster'"),
    "CLUSTERDOWN": ServerError(route=Route.CHECKED, remedy="see to the cluster"),
    "MOVED": ServerError(Meaning.ABSENT, Route.CHECKED),
    "ASK": ServerError(Meaning.ABSENT),
    "TRYAGAIN": ServerError(Meaning.ABSENT),
}

_CLASSES: Final = {
    "OutOfMemoryError": "OOM",
    "ReadOnlyError": "READONLY",
    "NoPermissionError": "NOPERM",
    "BusyLoadingError": "LOADING",
}
"""The client library's classes of errors, in whose text the word is missing."""


def error_code(reply: Reply) -> str:
    """Return the word that an error begins with, such as ``OOM``."""
    return reply.text.partition(" ")[0]


def error_of(reply: Reply | None) -> ServerError | None:
    """Return what an error means; None for what is none."""
    if reply is None or reply.kind is not Kind.ERROR:
        return None
    return SERVER_ERRORS.get(error_code(reply), SERVER_ERRORS["ERR"])


def refuses_writes(kind: str) -> bool:
    """Tell whether a server that answers a write so serves what it has.

    ``kind``: of ``client.ServerRefused``.
    """
    return _row(kind).refuses_writes


def remedy_of(kind: str) -> str:
    """Return what a person may do, in words; empty if nothing is known. ``kind``: as above."""
    return _row(kind).remedy


def _row(kind: str) -> ServerError:
    return SERVER_ERRORS.get(_CLASSES.get(kind, kind), SERVER_ERRORS["ERR"])


def in_words(reply: Reply) -> str:
    """Return what a server says, and what to do about it."""
    error = error_of(reply)
    return f"{reply.text} ({error.remedy})" if error is not None and error.remedy else reply.text
