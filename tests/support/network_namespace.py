"""Runs a part of a test in a network namespace of its own, where packets can be dropped.

There is nothing in it but ``lo``. A namespace belongs to threads, and libraries keep threads, so
the part is a process: it starts its servers inside, and they end with it, and it with the test.
"""

from __future__ import annotations

import asyncio
import importlib
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvtier.tools.process_group import process_group
from stress.own_network import enter_own_network
from tests.support.server_program import ending_with_this_process

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

REPOSITORY: Final = Path(__file__).parents[2]
_TABLE: Final = "inet faults"
_TABLES: Final = ("tcp", "tcp6")
_ESTABLISHED, _LISTENS = "01", "0A"


class Network:
    """The faults of the namespace that this process is in."""

    def drop(self, port: int) -> None:
        """Let nothing through to the server or from it: neither side is told."""
        self._break(f"tcp dport {port} drop", f"tcp sport {port} drop")

    def drop_requests(self, port: int) -> None:
        """Let nothing through to the server."""
        self._break(f"tcp dport {port} drop")

    def drop_replies(self, port: int) -> None:
        """Let nothing through from the server: what it is asked for, it does."""
        self._break(f"tcp sport {port} drop")

    def cut_replies(self, port: int, after_bytes: int) -> None:
        """Drop what comes from the server once so many bytes have come: within a reply."""
        self._break(f"tcp sport {port} quota over {after_bytes} bytes drop")

    def reset(self, port: int) -> None:
        """Answer whatever is sent, by either side, with a reset of its connection."""
        self._break(
            "tcp flags & rst == rst accept",  # these are the answers
            f"tcp dport {port} reject with tcp reset",
            f"tcp sport {port} reject with tcp reset",
        )

    def strand(self, port: int) -> int:
        """Drop the packets of all connections that there are; new ones go through.

        So a firewall forgets connections that were idle. Returns how many they were.
        """
        clients = {here for here, there in _sockets("tcp", _ESTABLISHED) if there == port}
        assert clients, "there are no connections"
        ports = "{ " + ", ".join(map(str, sorted(clients))) + " }"
        self._break(
            f"tcp dport {port} tcp sport {ports} drop", f"tcp sport {port} tcp dport {ports} drop"
        )
        return len(clients)

    def heal(self) -> None:
        """Let all packets through."""
        _nft(f"table {_TABLE}\ndelete table {_TABLE}\n")

    def _break(self, *rules: str) -> None:
        lines = "\n".join(f"    {rule}" for rule in rules)
        _nft(
            f"table {_TABLE}\ndelete table {_TABLE}\n"
            f"table {_TABLE} {{\n  chain arriving {{\n"
            f"    type filter hook input priority 0;\n{lines}\n  }}\n}}\n"
        )


def run_inside(part: Callable[..., Awaitable[None]], folder: Path, *arguments: str) -> None:
    """Run a coroutine function of a module in a new namespace; what it raises fails the test.

    It is called with the ``Network``, the folder and the arguments.
    """
    command = [sys.executable, "-m", __name__]
    command += [part.__module__, part.__name__, str(folder), *arguments]
    with process_group(
        ending_with_this_process(command),
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as child:
        said, _ = child.communicate()  # each of its waits has an end of its own
    assert child.returncode == 0, said.decode(errors="replace")[-6000:]


def _nft(script: str) -> None:
    done = subprocess.run(
        ["nft", "-f", "-"], input=script, text=True, capture_output=True, check=False
    )
    assert done.returncode == 0, f"{done.stderr}\nof\n{script}"


def connected_ports() -> set[int]:
    """Return the ports of the servers that somebody is connected to."""
    listening = {here for table in _TABLES for here, _ in _sockets(table, _LISTENS)}
    return {there for _, there in _sockets(_TABLES[0], _ESTABLISHED) if there in listening}


def _sockets(table: str, state: str) -> list[tuple[int, int]]:
    """Return the ports of all sockets in this state: here, and there."""
    found = []
    for line in Path("/proc/self/net", table).read_text().splitlines()[1:]:
        _, here, there, state_now, *_ = line.split()
        if state_now == state:
            found.append((int(here.rpartition(":")[2], 16), int(there.rpartition(":")[2], 16)))
    return found


def _main(module: str, name: str, folder: str, *arguments: str) -> None:
    assert re.fullmatch(r"tests(\.\w+)+", module)
    enter_own_network()
    part = getattr(importlib.import_module(module), name)
    asyncio.run(part(Network(), Path(folder), *arguments))


if __name__ == "__main__":
    _main(*sys.argv[1:])
