"""Where a cluster sends a command on to, while hash slots move from one node to another.

MOVED  the hash slot is another node's now: the map that the tier has is old
ASK    it is being moved, and what is called so is not here: it may have arrived there already.
       The other node answers only what comes behind an ``ASKING``
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Final, NamedTuple

from kvtier_backends.redis.addresses import Address
from kvtier_backends.redis.resp import Command, Kind, packed

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from kvtier_backends.redis.resp import Reply

HOPS_MAX: Final = 4
"""So many nodes a command is sent to in turn: nodes that disagree would redirect it for ever."""

UNSETTLED: Final = frozenset(["MOVED", "ASK", "TRYAGAIN"])
"""Errors of a cluster in which hash slots move."""

_ASKING: Final = packed(b"ASKING")


class Target(NamedTuple):
    """A node to send commands to."""

    address: Address
    is_asked: bool = False  #: its hash slot has not arrived there altogether

    def framed(self, commands: Sequence[Command]) -> Sequence[Command]:
        """Return what to send."""
        return [*_each_asked(commands)] if self.is_asked else commands


def redirected(sent: Mapping[Target, Sequence[Command]]) -> dict[Target, list[Command]]:
    """Return the commands to be sent on. They have no reply any more."""
    further: dict[Target, list[Command]] = defaultdict(list)
    for target, commands in sent.items():
        for command in commands:
            onward = onward_untrusted(command.reply, target.address)
            if onward is not None:
                command.forget_reply()
                further[onward].append(command)
    return further


def onward_untrusted(reply: Reply | None, asked: Address) -> Target | None:
    """Read ``ASK <slot> <host>:<port>``. None for all else; raises nothing."""
    if reply is None or reply.kind is not Kind.ERROR:
        return None
    code, _, rest = reply.text.partition(" ")
    host, _, port = rest.partition(" ")[2].rpartition(":")
    if code not in ("ASK", "MOVED") or host == "?" or not (port.isascii() and port.isdigit()):
        return None
    number = int(port[:6])
    if not 0 < number < 1 << 16:
        return None
    # A node that does not know its own name leaves it empty: it is at the host that was asked.
    return Target(Address(host.strip("[]") or asked.host, number), code == "ASK")


def _each_asked(commands: Sequence[Command]) -> Iterator[Command]:
    for command in commands:
        yield Command((_ASKING,))
        yield command
