"""A Valkey master and its replica behind one name, with a password that may change."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from kvtier.plugin_api.atomic_file import write_whole
from stress.children import start_part
from stress.ports import HOST
from stress.remote.valkey_server import ValkeyServer

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import valkey

    from stress.children import Part


class Masters:
    """Behaves as the one server that the name leads to. One thread."""

    def __init__(self, folder: Path, memory: Mapping[str, str | int]) -> None:
        """``memory``: settings of how much each takes."""
        folder.mkdir()
        self.usual = memory  #: what its faults set back
        self.password_file = folder / "password"
        self._passwords = 0
        self._servers = [ValkeyServer(folder / name, memory) for name in ("one", "other")]
        self._stack = ExitStack()
        self._name: Part | None = None
        self.port = 0  #: of the name, once it was started
        self.write_password()

    @property
    def password(self) -> str:
        """What the servers ask for now."""
        return f"password-{self._passwords}"

    @property
    def runs(self) -> bool:
        """Whether the master runs."""
        return self._master.runs

    def start(self) -> None:
        """Start what does not run. Raises ``Failure``."""
        for server in self._servers:
            if not server.runs:
                server.start()
                with server.client() as client:
                    self._set_password(client)
        self._take_places()
        if self._name is None:
            name = start_part("stress.remote.moving_name", {"leads_to": self._master.port})
            self._name = self._stack.enter_context(name)
            self.port = self._name.answer()

    def kill(self) -> None:
        """Kill the master. It comes again empty, and its replica follows."""
        self._master.kill()

    def stop(self) -> None:
        """Let the master hang."""
        self._master.stop()

    def go_on(self) -> None:
        """Let it answer again."""
        self._master.go_on()

    def end(self) -> None:
        """End all for good."""
        self._stack.close()
        for server in self._servers:
            server.end()

    def client(self) -> valkey.Valkey:
        """Return a client of the master. Close it."""
        return self._master.client(self.password)

    def change_places(self) -> None:
        """Have the replica become the master. The old one keeps its connections."""
        self._servers.reverse()
        self._take_places()
        assert self._name is not None, "it was not started"
        self._name.ask(leads_to=self._master.port)

    def change_password(self) -> None:
        """Have the servers ask for another one, and end all connections. The file is behind."""
        before, self._passwords = self.password, self._passwords + 1
        for server in self._servers:
            with server.client(before) as client:
                self._set_password(client)
            with server.client(self.password) as client:
                client.client_kill_filter(_type="normal", skipme=True)

    def write_password(self) -> None:
        """Write what the servers ask for into the file."""

        def write(path: Path) -> None:
            path.write_text(self.password)
            path.chmod(0o600)

        write_whole(self.password_file, write)

    @property
    def _master(self) -> ValkeyServer:
        return self._servers[0]

    def _set_password(self, client: valkey.Valkey) -> None:
        client.config_set("masterauth", self.password)
        client.config_set("requirepass", self.password)

    def _take_places(self) -> None:
        master, replica = self._servers
        with master.client(self.password) as client:
            client.execute_command("REPLICAOF", "NO", "ONE")
        with replica.client(self.password) as client:
            client.execute_command("REPLICAOF", HOST, master.port)
