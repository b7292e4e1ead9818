"""Loads Mooncake's own client library, and defines the functions and codes that are used of it.

The library is native code. A call of a closed or closing client ends the process;
``client.py`` rules that out.
"""

from __future__ import annotations

import importlib
import os
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Final, Protocol

from kvtier.plugin_api.extras import install

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtier.errors import ConfigError
    from kvtier.plugin_api.options import Options

DEBIAN_PACKAGES: Final = "libibverbs1 libcurl4 libnuma1"

TRANSFER_S_MAX: Final = 60.0
"""The library's limit for a transfer. Then it reports a failure, and the transfer goes on."""

_SETUP_TRIES: Final = "2"  # each takes seconds if the master does not answer, 20 by default

_TCP_WAITS: Final = ("MC_TCP_STATUS_TIMEOUT_SEC", "MC_TCP_PROGRESS_TIMEOUT_SEC")


class Code(IntEnum):
    """The library's result for one object; 0 and above is success."""

    NO_SEGMENT = -101
    NO_ROOM = -200
    BAD_PARAMETERS = -600  #: also: the object is longer than the buffers
    NOT_READY = -703  #: it is still being stored
    NOT_FOUND = -704
    EXISTS = -705
    LEASE_EXPIRED = -707  #: it was loaded, but the store may have replaced it meanwhile
    REPLICA_NOT_FOUND = -710
    REPLICA_IS_GONE = -712
    TRANSFER_FAILED = -800  #: also: the object is shorter than the buffers
    RPC_FAILED = -900  #: the master did not answer
    RPC_TIMED_OUT = -901
    OWNER_IS_SILENT = -1_000_000  #: not the library's: a transfer that failed after its timeout


ABSENT_CODES: Final = frozenset(
    {Code.NOT_READY, Code.NOT_FOUND, Code.REPLICA_NOT_FOUND, Code.REPLICA_IS_GONE}
)
FULL_CODES: Final = frozenset({Code.NO_SEGMENT, Code.NO_ROOM})
MASTER_CODES: Final = frozenset({Code.RPC_FAILED, Code.RPC_TIMED_OUT})


class NativeStore(Protocol):
    """The part of ``MooncakeDistributedStore`` in use. All methods but two release the GIL."""

    def setup(self, local_hostname: str, *args: object, **named: object) -> int:
        """Connect to the master. Holds the GIL, for seconds if the master does not answer."""

    def close(self) -> int:
        """End all that runs. Holds the GIL, for about a second."""

    def health_check(self) -> int:
        """Return 0 if the last heartbeat reached the master. Sends nothing; safe once closed."""

    def register_buffer(self, buffer_ptr: int, size: int) -> int:
        """Register memory with the transport."""

    def batch_put_from_multi_buffers(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        config: object,
    ) -> list[int]:
        """Store objects, each gathered from several buffers."""

    def batch_get_into_multi_buffers(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
    ) -> list[int]:
        """Load objects, each scattered into several buffers. Returns lengths."""

    def batch_get_into(
        self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int]
    ) -> list[int]:
        """Load objects, each into a buffer that may be longer. Returns lengths."""

    def batch_is_exist(self, keys: Sequence[str]) -> list[int]:
        """Return for each object whether it exists: 1, 0, or an error."""

    def batch_remove(self, keys: Sequence[str], force: bool) -> list[int]:  # noqa: FBT001 - the library's
        """Remove objects; forced, even while a lease on them lasts."""

    def get_size(self, key: str) -> int:
        """Return an object's length."""


def load_library(reader: Options) -> Any:  # noqa: ANN401 - a module without types
    """Return the library. Raises ``ConfigError`` if it, or a library it links to, is missing."""
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")  # it reads this once, while it is imported
    try:
        return importlib.import_module("mooncake.store")
    except ModuleNotFoundError:
        raise _refusal(
            reader,
            f"needs Mooncake's client, which is not installed: {install('mooncake')}",
        ) from None
    except ImportError as problem:
        raise _refusal(
            reader,
            f"needs libraries that Mooncake's client is linked to ({problem}). On Debian and "
            f"Ubuntu: apt-get install {DEBIAN_PACKAGES}",
        ) from None


def set_environment(timeout_s: float) -> None:
    """Set the library's timeouts that are not set yet."""
    milliseconds = str(max(1, int(timeout_s * 1000)))
    for name, value in (
        ("MC_RPC_TIMEOUT_MS", milliseconds),
        ("MC_RPC_CONNECT_TIMEOUT_MS", milliseconds),
        *((name, str(max(1, int(timeout_s)))) for name in _TCP_WAITS),
        ("MC_STORE_CLIENT_SETUP_RETRIES", _SETUP_TRIES),
    ):
        os.environ.setdefault(name, value)


def silence_s() -> float:
    """Return the shortest time the library waits for a byte of an owner before it gives up."""
    try:
        return min(float(os.environ[name]) for name in _TCP_WAITS)
    except ValueError:  # a user's value, which the library does not accept either
        return 1.0


def told(code: int) -> str:
    """Return the meaning of a code, for people."""
    try:
        return f"{Code(code).name.lower().replace('_', ' ')} ({code})"
    except ValueError:
        return f"code {code}"


def _refusal(reader: Options, remedy: str) -> ConfigError:
    return reader.error("type", "mooncake", remedy)
