"""The remote layer: the runtime over two servers, each of which others may harm as they like.

What lies there is plain, signed or encrypted, as the seed has it.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Final

from stress.ports import HOST
from stress.remote import faults
from stress.remote.valkey_server import ValkeyServer
from stress.runtime import processes
from stress.runtime.in_process import ENGINE_KINDS, InProcess
from stress.runtime.layer import IMPATIENT, POLICIES, TIMEOUTS
from stress.runtime.quick_restarts import quick_restarts

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from stress.layer import Injector
    from stress.plan import Fault, Kind
    from stress.record import Record

FIRST, SECOND = "1:redis", "2:redis"
TIERS: Final = (FIRST, SECOND)
_KEY: Final = "c0" * 32
PROTECTIONS: Final = ("", "auth_key_file", "encryption_key_file")


class RemoteLayer(InProcess):
    """Two ``redis`` tiers, in processes of their own, each with a server of its own."""

    name: ClassVar[str] = "remote"
    requests_min: ClassVar[int] = 5_000
    blocks_read_min: ClassVar[int] = 15_000
    kinds: ClassVar[tuple[Kind, ...]] = (
        *ENGINE_KINDS,
        *faults.kinds(TIERS),
        *processes.kinds(TIERS),
    )

    @contextmanager
    def world(self, folder: Path, record: Record) -> Iterator[None]:
        """Start the servers, and end them."""
        del record
        self._key = folder / "key"
        self._key.write_text(_KEY)
        self._key.chmod(0o600)
        self._servers = {
            tier: ValkeyServer(folder / tier.replace(":", "-"), faults.USUAL) for tier in TIERS
        }
        of_servers, of_processes = faults.ServerFaults(self._servers), processes.ProcessFaults()
        self._who_does: dict[str, Injector] = {
            **{kind.name: of_servers for kind in faults.kinds(())},
            **{kind.name: of_processes for kind in processes.kinds(())},
        }
        try:
            for server in self._servers.values():
                server.start()
            with quick_restarts():
                yield
        finally:
            for server in self._servers.values():
                server.end()

    def settings(self, seed: int) -> Mapping[str, Any]:
        """Return the runtime's settings: the seed picks the policy, and what protects blocks."""
        protection = PROTECTIONS[seed % len(PROTECTIONS)]
        return {
            **IMPATIENT,
            "eviction_policy": POLICIES[seed % len(POLICIES)],
            "on_reset": ("new_generation", "keep")[seed // 2 % 2],
            "secondary_tiers": [
                {
                    "type": "redis",
                    "url": f"redis://{HOST}:{server.port}",
                    "presence_s": 2.0,
                    "connect_timeout_s": 0.5,
                    "call_timeout_s": 1.0,
                    "enable_kv_events": True,
                    **({protection: str(self._key)} if protection else {}),
                    **TIMEOUTS,
                }
                for server in self._servers.values()
            ],
        }

    def clock(self) -> float:
        """Return the time."""
        return time.monotonic()

    def begin(self, fault: Fault) -> int:
        """Do a fault."""
        return self._who_does[fault.kind].begin(fault)

    def end(self, fault: Fault) -> None:
        """Take a fault back."""
        self._who_does[fault.kind].end(fault)


def make_layer(_arguments: object) -> RemoteLayer:
    """Return the layer."""
    return RemoteLayer()
