"""A whole Ceph on loopback, for tests: a monitor, one OSD that keeps all in memory, and radosgw.

It takes a quarter of a minute to start, half a gigabyte of memory, and the Debian packages
``ceph-mon``, ``ceph-osd``, ``ceph-common`` and ``radosgw``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import uuid
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from tests.support.patience import PATIENCE_S
from tests.support.s3_server import ACCESS_KEY, BUCKET, SECRET_KEY, client_for
from tests.support.server_program import ServerProgram, ending_with_this_process, free_port

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PROGRAMS = ("ceph", "ceph-authtool", "ceph-mon", "ceph-osd", "monmaptool", "radosgw")
_USER = "tests"
PACKAGES = "ceph-mon ceph-osd ceph-common radosgw"

_SETTINGS = """
[global]
fsid = {fsid}
mon host = v2:127.0.0.1:{mon_port}
public addr = 127.0.0.1
auth cluster required = cephx
auth service required = cephx
auth client required = cephx
keyring = {folder}/$name.keyring
run dir = {folder}
admin socket = {folder}/$name.asok
log file = {folder}/$name.log
mon data = {folder}/mon
mon data avail crit = 1
mon allow pool size one = true
osd data = {folder}/osd
osd objectstore = memstore
memstore device bytes = 1073741824
osd crush chooseleaf type = 0
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 8
osd pool default pg autoscale mode = off
rgw data = {folder}
rgw frontends = beast endpoint=127.0.0.1:{rgw_port}
"""


class CephServer:
    """The daemons. Tests stop and kill ``gateway``, which is what the tier talks to."""

    def __init__(self, folder: Path) -> None:
        missing = [each for each in PROGRAMS if shutil.which(each) is None]
        if missing:
            pytest.fail(f"Ceph is not here ({', '.join(missing)}): apt-get install {PACKAGES}")
        self._folder = folder
        self._fsid = str(uuid.uuid4())
        self._mon_port, self._rgw_port = free_port(), free_port()
        self._daemons: list[ServerProgram] = []
        self.gateway = self._daemon("radosgw", "-n", "client.rgw", "-f", port=self._rgw_port)

    @property
    def endpoint(self) -> str:
        """Return radosgw's address."""
        return f"http://127.0.0.1:{self._rgw_port}"

    def start(self) -> None:
        """Start all, and make the bucket."""
        self._folder.mkdir()
        values = {"fsid": self._fsid, "mon_port": self._mon_port, "rgw_port": self._rgw_port}
        settings = _SETTINGS.format(folder=self._folder, **values)
        (self._folder / "ceph.conf").write_text(settings)
        self._start_monitor()
        self._start_osd()
        self._admin("user", "create", "--display-name", _USER, *_keys(ACCESS_KEY, SECRET_KEY))
        self.gateway.start()
        client_for(self.endpoint).create_bucket(Bucket=BUCKET)

    def give_key(self, access: str, secret: str) -> None:
        """Give the owner of the bucket another key, beside those that there are."""
        self._admin("key", "create", *_keys(access, secret))

    def end_key(self, access: str) -> None:
        """Have one of the owner's keys be refused from now on."""
        self._admin("key", "rm", "--key-type", "s3", "--access-key", access)

    def end(self) -> None:
        """End all."""
        for daemon in (self.gateway, *reversed(self._daemons)):
            daemon.kill()

    def _start_monitor(self) -> None:
        admin, own = self._keyring("client.admin"), self._keyring("mon.a")
        self._run("ceph-authtool", "-C", own, "--gen-key", "-n", "mon.", "--cap", "mon", "allow *")
        caps = [word for part in ("mon", "osd", "mgr") for word in ("--cap", part, "allow *")]
        self._run("ceph-authtool", "-C", admin, "--gen-key", "-n", "client.admin", *caps)
        self._run("ceph-authtool", own, "--import-keyring", admin)
        address = f"[v2:127.0.0.1:{self._mon_port}]"
        monmap = str(self._folder / "monmap")
        self._run("monmaptool", "--create", "--addv", "a", address, "--fsid", self._fsid, monmap)
        self._run("ceph-mon", "--mkfs", "-i", "a", "--monmap", monmap, "--keyring", own)
        self._start("ceph-mon", "-i", "a", "-f")

    def _start_osd(self) -> None:
        for name, mon, osd in (("osd.0", "profile osd", "*"), ("client.rgw", "rw", "rwx")):
            caps = ["mon", f"allow {mon}", "osd", f"allow {osd}"]
            self._run("ceph", "auth", "get-or-create", name, *caps, "-o", self._keyring(name))
        own = str(uuid.uuid4())
        self._run("ceph", "osd", "new", own)
        (self._folder / "osd").mkdir()
        self._run("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", own)
        self._start("ceph-osd", "-i", "0", "-f")

    def _admin(self, *arguments: str) -> None:
        self._run("radosgw-admin", "-n", "client.admin", *arguments, "--uid", _USER)

    def _keyring(self, name: str) -> str:
        return str(self._folder / f"{name}.keyring")

    def _environment(self) -> dict[str, str]:
        return {"CEPH_CONF": str(self._folder / "ceph.conf")}

    def _daemon(self, *arguments: str, port: int | None = None) -> ServerProgram:
        return ServerProgram(arguments, self._folder / "said.log", port, self._environment())

    def _start(self, *arguments: str) -> None:
        daemon = self._daemon(*arguments)
        self._daemons.append(daemon)
        daemon.start()

    def _run(self, *arguments: str) -> None:
        done = subprocess.run(
            ending_with_this_process(arguments),
            env={**os.environ, **self._environment()},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=PATIENCE_S,
            check=False,
        )
        said = done.stdout.decode(errors="replace")
        assert done.returncode == 0, f"{' '.join(arguments)}: {said}"


def _keys(access: str, secret: str) -> tuple[str, ...]:
    return "--access-key", access, "--secret-key", secret


@contextmanager
def ceph_server(folder: Path) -> Iterator[CephServer]:
    """Start a Ceph in a folder that is made, with one bucket; end it whatever happens."""
    server = CephServer(folder)
    try:
        server.start()
        yield server
    finally:
        server.end()
