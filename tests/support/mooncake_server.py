"""Starts Mooncake masters and owners of memory on loopback, which end with the test in any case."""

from __future__ import annotations

import os
from contextlib import contextmanager
from http.client import HTTPConnection
from importlib import resources
from typing import TYPE_CHECKING, Any, Final

from tests.support.needs import require
from tests.support.patience import PATIENCE_S
from tests.support.server_program import HOST, ServerProgram, free_port

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LASTING: Final = ("--default_kv_lease_ttl=600000", "--client_ttl=600")
"""Leases, and owners without a heartbeat, last longer than the slowest machine takes."""
SHORT_LEASES: Final = ("--default_kv_lease_ttl=500", "--client_ttl=600")
NO_LEASES: Final = ("--default_kv_lease_ttl=0", "--client_ttl=600")
OWNERS_EXPIRE: Final = ("--default_kv_lease_ttl=600000", "--client_ttl=10")


def program_path(name: str) -> str:
    """Return where a program of the package is. Without its libraries the test is skipped."""
    require("mooncake")
    return str(resources.files("mooncake").joinpath(name))


class Program(ServerProgram):
    """A program of the package."""

    port: int

    def __init__(self, name: str, log: Path, port: int, *arguments: str) -> None:
        libraries = f"{resources.files('mooncake')}:{os.environ.get('LD_LIBRARY_PATH', '')}"
        command = [program_path(name), *arguments]
        super().__init__(command, log, port, {"LD_LIBRARY_PATH": libraries})


class Cluster:
    """A master, and one process that owns the store's memory."""

    def __init__(self, folder: Path, segment: str = "64MB", *settings: str) -> None:
        port, self._metrics_port = free_port(), free_port()
        self.address = f"{HOST}:{port}"
        self.master = Program(
            "mooncake_master",
            folder / "master.log",
            port,
            f"--rpc_port={port}",
            f"--metrics_port={self._metrics_port}",
            f"--rpc_address={HOST}",
            f"--metrics_host={HOST}",
            *(settings or LASTING),
        )
        owner_port = free_port()
        self.owner = Program(
            "mooncake_client",
            folder / "owner.log",
            owner_port,
            f"--host={HOST}",
            f"--port={owner_port}",
            f"--global_segment_size={segment}",
            f"--master_server_address={self.address}",
            "--metadata_server=P2PHANDSHAKE",
        )

    def start(self) -> None:
        self.master.start()
        self.owner.start()

    def kill(self) -> None:
        self.owner.kill()
        self.master.kill()

    def count(self, name: str) -> int:
        """Return a metric of the master's, 0 if it has none of this name."""
        connection = HTTPConnection(HOST, self._metrics_port, timeout=PATIENCE_S)
        try:
            connection.request("GET", "/metrics")
            lines = connection.getresponse().read().decode().splitlines()
        finally:
            connection.close()
        found = [line.split()[-1] for line in lines if line.startswith(f"{name} ")]
        return int(float(found[0])) if found else 0


@contextmanager
def running(folder: Path, segment: str = "64MB", *settings: str) -> Iterator[Cluster]:
    """Give a store that runs."""
    cluster = Cluster(folder, segment, *settings)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.kill()


@contextmanager
def other_client(cluster: Cluster) -> Iterator[Any]:
    """Give a client of the library's own, as another program may have one."""
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    buffer_bytes = 16 << 20
    assert store.setup(HOST, "P2PHANDSHAKE", 0, buffer_bytes, "tcp", "", cluster.address) == 0
    try:
        yield store
    finally:
        store.close()
