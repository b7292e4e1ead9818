"""Starts Mooncake masters and owners of memory on loopback, which end with the test in any case."""

from __future__ import annotations

import os
import shutil
from contextlib import contextmanager
from http.client import HTTPConnection
from importlib import resources
from typing import TYPE_CHECKING, Any, Final

import pytest

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


class Master(Program):
    """A master of a store."""

    def __init__(self, folder: Path, *settings: str) -> None:
        port, self._metrics_port = free_port(), free_port()
        super().__init__(
            "mooncake_master",
            folder / f"master-{port}.log",
            port,
            f"--rpc_port={port}",
            f"--metrics_port={self._metrics_port}",
            f"--rpc_address={HOST}",
            f"--metrics_host={HOST}",
            *settings,
        )

    def count(self, name: str) -> int:
        """Return a metric, 0 if it has none of this name, or does not listen yet."""
        connection = HTTPConnection(HOST, self._metrics_port, timeout=PATIENCE_S)
        try:
            connection.request("GET", "/metrics")
            lines = connection.getresponse().read().decode().splitlines()
        except ConnectionRefusedError:
            return 0
        finally:
            connection.close()
        found = [line.split()[-1] for line in lines if line.startswith(f"{name} ")]
        return int(float(found[0])) if found else 0


class Cluster:
    """A master, and one process that owns the store's memory."""

    def __init__(self, folder: Path, segment: str = "64MB", *settings: str) -> None:
        self.master = Master(folder, *(settings or LASTING))
        self.address = f"{HOST}:{self.master.port}"
        self.owner = _owner(folder, segment, self.address)

    def start(self) -> None:
        self.master.start()
        self.owner.start()

    def kill(self) -> None:
        self.owner.kill()
        self.master.kill()


class ElectedMasters:
    """Two masters, of which etcd elects one, and a process that owns the store's memory.

    etcd is Debian's package ``etcd-server``.
    """

    def __init__(self, folder: Path, segment: str = "64MB") -> None:
        if shutil.which("etcd") is None:
            pytest.fail("etcd is not here: apt-get install etcd-server")
        port = free_port()
        here, peers = f"http://{HOST}:{port}", f"http://{HOST}:{free_port()}"
        self.address = f"etcd://{HOST}:{port}"
        self._etcd = ServerProgram(
            [
                "etcd",
                f"--data-dir={folder / 'etcd'}",
                f"--listen-client-urls={here}",
                f"--advertise-client-urls={here}",
                f"--listen-peer-urls={peers}",
                f"--initial-advertise-peer-urls={peers}",
                f"--initial-cluster=default={peers}",
            ],
            folder / "etcd.log",
            port,
        )
        elected = "--enable_ha=true", f"--etcd_endpoints={HOST}:{port}"
        self._first, self._second = (Master(folder, *elected, *OWNERS_EXPIRE) for _ in range(2))
        self._owner = _owner(folder, segment, self.address)

    def start(self) -> None:
        """Start all. The first master is elected: the other one comes after it."""
        self._etcd.start()
        self._first.start()
        self._second.start(waits=False)  # it listens once it is elected
        self._owner.start()

    def kill_the_first(self) -> None:
        """Kill the master that was elected."""
        self._first.kill()

    def second_has_memory(self) -> bool:
        """Tell whether the other master was elected, and the owner has come to it."""
        return self._second.count("master_total_capacity_bytes") > 0

    def kill(self) -> None:
        for each in (self._owner, self._second, self._first, self._etcd):
            each.kill()


def _owner(folder: Path, segment: str, master: str) -> Program:
    port = free_port()
    return Program(
        "mooncake_client",
        folder / "owner.log",
        port,
        f"--host={HOST}",
        f"--port={port}",
        f"--global_segment_size={segment}",
        f"--master_server_address={master}",
        "--metadata_server=P2PHANDSHAKE",
    )


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
