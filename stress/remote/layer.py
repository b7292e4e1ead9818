"""The remote layer: the runtime over servers, each of which others may harm as they like.

What lies there is plain, signed or encrypted, as the seed has it.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Final

from stress.ports import HOST
from stress.remote import bucket, faults
from stress.remote.masters import Masters
from stress.remote.valkey_server import ValkeyServer
from stress.runtime import processes
from stress.runtime.in_process import ENGINE_KINDS, TIMEOUTS, InProcess

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from stress.arguments import Arguments
    from stress.plan import Kind
    from stress.record import Record

FIRST, SECOND, THIRD = "1:redis", "2:redis", "3:s3"
TIERS: Final = (FIRST, SECOND)
BUCKETS: Final = (THIRD,)
_KEY: Final = "c0" * 32
PROTECTIONS: Final = ("", "auth_key_file", "encryption_key_file")
HEALS_S: Final = 10.0
_OF_BUCKETS: Final = frozenset(kind.name for kind in bucket.kinds(()))
_HEALING: Final = frozenset({"server_killed", "server_stopped", "server_full"})
_REMOTE: Final = {"enable_kv_events": True, **TIMEOUTS}


class RemoteLayer(InProcess):
    """Two ``redis`` tiers and one of ``s3``, in processes of their own.

    Each of the first has a master and a replica behind one name, and a password; in the gate, a
    server alone, and no third tier: what passwords, names and tokens need goes by the clock.
    """

    name: ClassVar[str] = "remote"
    requests_min: ClassVar[int] = 5_000
    blocks_read_min: ClassVar[int] = 15_000
    kinds: ClassVar[tuple[Kind, ...]] = (
        *ENGINE_KINDS,
        *faults.kinds(TIERS),
        *bucket.kinds(BUCKETS),
        *processes.kinds(TIERS),
    )
    not_in_the_gate: ClassVar[frozenset[str]] = faults.MOVING | _OF_BUCKETS
    heals_s: ClassVar[Mapping[str, float]] = dict.fromkeys(
        faults.MOVING | _OF_BUCKETS | _HEALING, HEALS_S
    )
    harmless: ClassVar[frozenset[str]] = frozenset({"cut_off", "harm_values", "server_slow"})

    def __init__(self, arguments: Arguments) -> None:
        self._is_gate = arguments.gate

    @contextmanager
    def world(self, folder: Path, record: Record) -> Iterator[None]:
        """Start the servers, and end them."""
        del record
        self._key = folder / "key"
        self._key.write_text(_KEY)
        self._key.chmod(0o600)
        folders = {tier: folder / tier.replace(":", "-") for tier in TIERS}
        self._servers: Mapping[str, ValkeyServer | Masters] = {
            tier: ValkeyServer(each, faults.USUAL)
            if self._is_gate
            else Masters(each, faults.REPLICATED)
            for tier, each in folders.items()
        }
        of_servers, of_processes = faults.ServerFaults(self._servers), processes.ProcessFaults()
        self.who_does = {
            **{kind.name: of_servers for kind in faults.kinds(())},
            **{kind.name: of_processes for kind in processes.kinds(())},
        }
        with ExitStack() as stack:
            for each in self._servers.values():
                stack.callback(each.end)
                each.start()
            self._bucket = None
            if not self._is_gate:
                self._bucket = bucket.Bucket(folder / "bucket")
                stack.callback(self._bucket.close)
                self.who_does |= dict.fromkeys(_OF_BUCKETS, self._bucket)
            yield

    def tiers(self, seed: int, policy: str) -> list[dict[str, Any]]:
        """Return the settings of the tiers: the seed picks what protects blocks."""
        del policy
        protection = PROTECTIONS[seed % len(PROTECTIONS)]
        protected = {protection: str(self._key)} if protection else {}
        tiers = [self._redis(server) | protected for server in self._servers.values()]
        if self._bucket is not None:
            tiers.append(self._s3(self._bucket) | protected)
        return tiers

    @staticmethod
    def _redis(server: ValkeyServer | Masters) -> dict[str, Any]:
        login = {}
        if isinstance(server, Masters):
            login["password_file"] = str(server.password_file)
        return {
            "type": "redis",
            "url": f"redis://{HOST}:{server.port}",
            "presence_ttl_s": 2.0,
            "connect_timeout_s": 0.5,
            "call_timeout_s": 1.0,
            **login,
            **_REMOTE,
        }

    @staticmethod
    def _s3(held: bucket.Bucket) -> dict[str, Any]:
        return {
            "type": "s3",
            "url": "s3://soak/kv",
            "endpoint": f"http://{HOST}:{held.port}",
            "allow_http": True,
            "presence_ttl_s": 2.0,
            "request_timeout_s": 1.0,
            "credentials_command": f"cat {held.keys_file}",
            **_REMOTE,
        }
