"""Follows a cluster's redirections while hash slots move from one node to another.

MOVED  the hash slot is another node's now: the tier's map is old
ASK    it is being moved, and the key is not here: it may already have arrived at the other
       node, which answers only commands that follow an ``ASKING``
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Final, NamedTuple

from kvtier_backends.redis.addresses import Address
from kvtier_backends.redis.resp import Command, ReplyKind, packed

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from kvtier_backends.redis.resp import Reply

HOPS_MAX: Final = 4
"""Most nodes that a command is sent to in turn: nodes that disagree would redirect it forever."""

UNSETTLED: Final = frozenset(["MOVED", "ASK", "TRYAGAIN"])
"""Errors of a cluster while hash slots move."""

_ASKING: Final = packed(b"ASKING")


class Target(NamedTuple):
    """A node to send commands to."""

    address: Address
    is_asked: bool = False  #: its hash slot has not fully arrived there

    def framed(self, commands: Sequence[Command]) -> Sequence[Command]:
        """Return the commands to send."""
        return [*_each_asked(commands)] if self.is_asked else commands


def redirected(sent: Mapping[Target, Sequence[Command]]) -> dict[Target, list[Command]]:
    """Return the commands to be redirected. Their replies are cleared."""
    further: dict[Target, list[Command]] = defaultdict(list)
    for target, commands in sent.items():
        for command in commands:
            onward = onward_untrusted(command.reply, target.address)
            if onward is not None:
                command.forget_reply()
                further[onward].append(command)
    return further


def onward_untrusted(reply: Reply | None, asked: Address) -> Target | None:
    """Parse ``ASK <slot> <host>:<port>``. None for anything else; raises nothing."""
    if reply is None or reply.kind is not ReplyKind.ERROR:
        return None
    code, _, rest = reply.text.partition(" ")
    host, _, port = rest.partition(" ")[2].rpartition(":")
    if code not in ("ASK", "MOVED") or host == "?" or not (port.isascii() and port.isdigit()):
        return None
    number = int(port[:6])
    if not 0 < number < 1 << 16:
        return None
    # A node that does not know its own name leaves it empty: it is the host that was queried.
    return Target(Address(host.strip("[]") or asked.host, number), code == "ASK")


def _each_asked(commands: Sequence[Command]) -> Iterator[Command]:
    for command in commands:
        yield Command((_ASKING,))
        yield command
