"""Maps a server's errors, by their first word, to their meaning for a block and for the tier.

The words are those of Redis 7 and Valkey 8 that the commands of a tier can meet, and ``MAXCLIENTS``
for the error that has none of its own. An unlisted error concerns only the block, as ``ERR`` does.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import TYPE_CHECKING, Final, NamedTuple

from kvtier_backends.redis.resp import ReplyKind

if TYPE_CHECKING:
    from kvtier_backends.redis.resp import Reply


class Meaning(Enum):
    """State of a block after an error reply to its command."""

    FAILED = auto()
    FULL = auto()
    DAMAGED = auto()  #: something else has the block's name
    ABSENT = auto()  #: for a load: its hash slot moves


class Route(Enum):
    """Consequence of an error for the connection that it came over, and for the servers."""

    KEPT = auto()  #: nothing
    CHECKED = auto()  #: the servers may differ from the tier's map
    LEFT = auto()  #: its server, as on all idle ones, is not, or no longer, the one to query


class ServerError(NamedTuple):
    """A row of ``SERVER_ERRORS``."""

    meaning: Meaning = Meaning.FAILED
    route: Route = Route.KEPT
    refuses_writes: bool = False  #: and serves its data
    remedy: str = ""  #: for the log


MAXCLIENTS: Final = "MAXCLIENTS"
_MAXCLIENTS_TEXT: Final = "max number of clients reached"

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
    "NOAUTH": ServerError(
        route=Route.LEFT,
        remedy="the server wants a login, or a different one: give the tier username and one of "
        "password_file, password_env, password_command",
    ),
    MAXCLIENTS: ServerError(
        remedy="the server has as many clients as it takes: raise its maxclients, or lower the "
        "connections_max of the engines",
    ),
    "BUSY": ServerError(remedy="a script runs on the server: see to it, or run SCRIPT KILL there"),
    "CROSSSLOT": ServerError(remedy="it is a node of a cluster: set mode to 'cluster'"),
    "CLUSTERDOWN": ServerError(route=Route.CHECKED, remedy="see to the cluster"),
    "MOVED": ServerError(Meaning.ABSENT, Route.CHECKED),
    "ASK": ServerError(Meaning.ABSENT),
    "TRYAGAIN": ServerError(Meaning.ABSENT),
}

MAY_NOT: Final = "NoPermissionError"
_CLASSES: Final = {
    "OutOfMemoryError": "OOM",
    "ReadOnlyError": "READONLY",
    MAY_NOT: "NOPERM",
    "BusyLoadingError": "LOADING",
    "AuthenticationError": "NOAUTH",
}
"""The client library's error classes whose text lacks the word."""


def error_code(text: str) -> str:
    """Return the key of an error in the table: usually its first word, such as ``OOM``."""
    return MAXCLIENTS if text.endswith(_MAXCLIENTS_TEXT) else text.partition(" ")[0]


def error_of(reply: Reply | None) -> ServerError | None:
    """Return an error's meaning; None for a reply that is not an error."""
    if reply is None or reply.kind is not ReplyKind.ERROR:
        return None
    return SERVER_ERRORS.get(error_code(reply.text), SERVER_ERRORS["ERR"])


def error_named(kind: str) -> ServerError:
    """Return an error's meaning. ``kind``: of ``client.ServerRefused``."""
    return SERVER_ERRORS.get(_CLASSES.get(kind, kind), SERVER_ERRORS["ERR"])


def in_words(reply: Reply) -> str:
    """Return a server's error text, and the remedy."""
    error = error_of(reply)
    return f"{reply.text} ({error.remedy})" if error is not None and error.remedy else reply.text
