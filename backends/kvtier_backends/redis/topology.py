"""Finds the server of each block: one server, the master that sentinels name, or a cluster's node.

A cluster divides its 16384 hash slots among its masters; a block's name has one slot. The map is
queried when the tier connects, at each check, and after a MOVED reply. While hash slots move from
one node to another, the cluster's redirections are followed:

MOVED  the hash slot is another node's now: the tier's map is old
ASK    it is being moved, and the key is not here: it may already have arrived at the other
       node, which answers only commands that follow an ``ASKING``
"""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kvtier.errors import StoreFault
from kvtier_backends.redis.client import ServerRefused
from kvtier_backends.redis.redis_options import Address
from kvtier_backends.redis.resp import Command, ReplyKind, packed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from kvtier_backends.redis.client import RedisClient
    from kvtier_backends.redis.redis_options import RedisOptions
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


class Topology:
    """Maps each block's name to its server. Does not change."""

    def __init__(
        self,
        ranges: Sequence[tuple[int, int, Address]],
        key_slot: Callable[[bytes], int],
        *,
        is_cluster: bool = False,
    ) -> None:
        """``ranges``: first and last hash slot, and their server."""
        self._ranges = sorted(ranges)
        self._key_slot = key_slot
        self.is_cluster = is_cluster
        self.addresses = frozenset(address for _, _, address in ranges)
        #: the server of all blocks, whatever their names; None if there are several
        self.only = None if is_cluster else ranges[0][2]

    def server_of(self, name: bytes) -> Address | None:
        """Return the server in charge of this name; None if there is none."""
        slot = self._key_slot(name)
        for first, last, address in self._ranges:
            if first <= slot <= last:
                return address
        return None


async def discover(client: RedisClient, given: RedisOptions) -> Topology:
    """Query which server has which blocks. Raises ``StoreFault``."""
    addresses = given.servers.addresses
    if given.mode == "cluster":
        ranges = await _first_answer(addresses, partial(_ask_node, client))
        return Topology(ranges, client.key_slot, is_cluster=True)
    if given.mode == "sentinel":
        ask = partial(_ask_sentinel, client, given.sentinel_master or "")
        addresses = (await _first_answer(addresses, ask),)
    return Topology([(0, 16383, addresses[0])], client.key_slot)


async def _ask_node(client: RedisClient, address: Address) -> list[tuple[int, int, Address]]:
    async with client.asking(address) as ask:
        found = await ask("CLUSTER", "SLOTS")
    try:
        ranges = [_range_untrusted(each, address) for each in found]
    except (TypeError, ValueError, IndexError):
        raise ServerRefused(f"{address} brought no map of a cluster") from None
    if not ranges:
        raise StoreFault(f"{address} is of a cluster without hash slots")
    return ranges


def _range_untrusted(found: Any, asked: Address) -> tuple[int, int, Address]:  # noqa: ANN401 - checked here
    first, last, (host, port, *_), *_ = found
    # A node that does not know its own name leaves it empty: it is the one that was queried.
    name = _text_of(host or b"") or asked.host
    return int(first), int(last), Address(name, int(port))


async def _ask_sentinel(client: RedisClient, master: str, address: Address) -> Address:
    async with client.asking(address, is_sentinel=True) as ask:
        found = await ask("SENTINEL", "GET-MASTER-ADDR-BY-NAME", master)
    if not found:
        raise StoreFault(f"sentinel {address} knows no master {master!r}")
    try:
        host, port = found
        return Address(_text_of(host), int(port))
    except (TypeError, ValueError):
        raise ServerRefused(f"sentinel {address} named no address") from None


def _text_of(reply: object) -> str:
    """Return a server's reply as printable text."""
    if isinstance(reply, bytes):
        return reply.decode("utf-8", "backslashreplace")
    return str(reply)


async def _first_answer(addresses: Sequence[Address], ask: Callable[[Address], Any]) -> Any:  # noqa: ANN401 - what ``ask`` returns
    """Query the servers in order until one answers. Raises the last one's ``StoreFault``."""
    problem = StoreFault("no server is known")
    for address in addresses:
        try:
            return await ask(address)
        except StoreFault as fault:
            problem = fault
    raise problem
