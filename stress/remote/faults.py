"""Faults of a server: killed, stopped, emptied, cut off, full, slow, and with wrong bytes in it."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import valkey

from stress.contents import BLOCK_BYTES
from stress.plan import Kind
from stress.remote.masters import Masters

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Mapping, Sequence

    from stress.plan import Fault
    from stress.remote.valkey_server import ValkeyServer

USUAL: Final[Mapping[str, str | int]] = {"maxmemory": 4 << 20, "maxmemory-policy": "allkeys-lru"}
"""A server has room for some hundred blocks. It evicts those above, and tells nobody."""

REPLICATED: Final[Mapping[str, str | int]] = {**USUAL, "maxmemory": 12 << 20}
"""As many blocks, beside what a replica has not been sent yet."""

TAKES_WRITES: Final[Mapping[str, str | int]] = {"min-replicas-to-write": 0}
REFUSING: Final[Mapping[str, str | int]] = {"min-replicas-to-write": 9}

FULL: Final[Mapping[str, str | int]] = {"maxmemory": 1, "maxmemory-policy": "noeviction"}
"""It refuses whatever is stored."""

MOVING: Final = frozenset({"master_moved", "writes_refused", "password_rotated"})
"""What takes a replica, a name, and a password: no kinds of the gate's."""

HARMED_A_FAULT: Final = 16
RECORD_BYTES: Final = BLOCK_BYTES + 64  #: about what lies under a name


def kinds(tiers: Sequence[str]) -> tuple[Kind, ...]:
    """Return the kinds of faults, for the servers of these tiers."""
    targets = tuple(tiers)
    return (
        Kind("server_killed", targets, per_minute=4, spell_s=(0.05, 2.0)),
        Kind("server_stopped", targets, per_minute=6, spell_s=(0.1, 2.0)),
        Kind("server_full", targets, per_minute=6, spell_s=(0.1, 2.0)),
        Kind("server_slow", targets, per_minute=10),
        Kind("emptied", targets, per_minute=3),
        Kind("cut_off", targets, per_minute=20),
        Kind("harm_values", targets, per_minute=60),
        Kind("master_moved", targets, per_minute=3),
        Kind("writes_refused", targets, per_minute=4, spell_s=(0.2, 4.0)),
        Kind("password_rotated", targets, per_minute=2, spell_s=(0.1, 4.0)),
    )


class ServerFaults:
    """Does them, and takes them back. One thread."""

    def __init__(self, servers: Mapping[str, ValkeyServer | Masters]) -> None:
        """Those of ``MOVING`` are done to ``Masters`` alone."""
        self._servers = servers
        self._held: dict[str, str] = {}  # tier → the seed of the fault that holds its server
        self._ask: dict[str, Callable[[valkey.Valkey, random.Random], int]] = {
            "server_full": _fill,
            "server_slow": _delay,
            "emptied": _empty,
            "cut_off": _cut_off,
            "harm_values": _harm,
            "writes_refused": _refuse_writes,
        }

    def begin(self, fault: Fault) -> int:
        """Do a fault; returns how many wrongs that was: none to a server that another one holds."""
        server, ask = self._servers[fault.target], self._ask.get(fault.kind)
        if fault.target in self._held:
            return 0
        if ask is not None:
            with server.client() as client, suppress(valkey.ResponseError):  # it refuses writes
                return ask(client, fault.dice)
            return 0
        if fault.kind == "master_moved":
            assert isinstance(server, Masters), "no kind of the gate's"
            server.change_places()
            return 1
        self._held[fault.target] = fault.seed
        if fault.kind == "password_rotated":
            assert isinstance(server, Masters), "no kind of the gate's"
            server.change_password()
        elif fault.kind == "server_killed":
            server.kill()
        else:
            server.stop()
        return 1

    def end(self, fault: Fault) -> None:
        """Take a fault back. A server that nothing holds has room again, too."""
        server = self._servers[fault.target]
        if self._held.get(fault.target) == fault.seed:
            del self._held[fault.target]
            if fault.kind == "password_rotated":
                assert isinstance(server, Masters), "no kind of the gate's"
                server.write_password()
            elif server.runs:
                server.go_on()
            else:
                server.start()
        if fault.target not in self._held:
            with server.client() as client:
                _set(client, {**server.usual, **TAKES_WRITES})


def _fill(client: valkey.Valkey, _dice: random.Random) -> int:
    _set(client, FULL)
    return 1


def _set(client: valkey.Valkey, settings: Mapping[str, str | int]) -> None:
    for name, value in settings.items():
        client.config_set(name, value)


def _refuse_writes(client: valkey.Valkey, _dice: random.Random) -> int:
    _set(client, REFUSING)
    return 1


def _delay(client: valkey.Valkey, dice: random.Random) -> int:
    """Have it answer nobody for a while, by a script that counts."""
    client.eval(f"for i = 1, {dice.randrange(1, 20)} * 1000000 do end", 0)
    return 1


def _empty(client: valkey.Valkey, _dice: random.Random) -> int:
    client.flushall()
    return 1


def _cut_off(client: valkey.Valkey, _dice: random.Random) -> int:
    ended: Any = client.client_kill_filter(_type="normal", skipme=True)
    return int(ended)


def _harm(client: valkey.Valkey, dice: random.Random) -> int:
    """Change values: a byte, the length, the type, or another block's bytes under this name."""
    harmed = 0
    for _ in range(HARMED_A_FAULT):
        name, other = client.randomkey(), client.randomkey()
        if not (isinstance(name, bytes) and isinstance(other, bytes)):
            break
        if not name.endswith(b":description"):  # an operator's to mend: the tier says how
            _harm_one(client, dice, name.decode(), other.decode())
            harmed += 1
    return harmed


def _harm_one(client: valkey.Valkey, dice: random.Random, name: str, other: str) -> None:
    byte, anything = dice.randbytes(1), dice.randbytes(dice.randrange(2 * RECORD_BYTES))
    ways: Sequence[Callable[[], object]] = (
        lambda: client.setrange(name, dice.randrange(RECORD_BYTES), byte),
        lambda: client.set(name, anything),
        lambda: client.append(name, byte),
        lambda: client.copy(other, name, replace=True),
        lambda: (client.delete(name), client.lpush(name, "a list")),
    )
    with suppress(valkey.ResponseError):  # it is a list already
        dice.choice(ways)()
