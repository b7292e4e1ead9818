"""A bucket in a process of its own: it may refuse writes, tokens, and clocks."""

from __future__ import annotations

import json
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final

from kvtier.plugin_api.atomic_file import write_whole
from stress.children import start_part
from stress.plan import Kind

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from stress.plan import Fault

OBJECTS_MAX: Final = 400
"""As a lifecycle rule would have it: the oldest are removed, and nobody is told."""

_SERVER: Final = "tests.support.s3_fault_server"
_FAULTS: Final = {"bucket_read_only": "DENIED:PUT", "clock_jumped": "SKEWED:ALL"}


def kinds(tiers: Sequence[str]) -> tuple[Kind, ...]:
    """Return the kinds of faults, for the buckets of these tiers."""
    targets = tuple(tiers)
    return (
        Kind("bucket_read_only", targets, per_minute=4, spell_s=(0.5, 4.0)),
        Kind("clock_jumped", targets, per_minute=2, spell_s=(0.5, 4.0)),
        Kind("token_expired", targets, per_minute=2, spell_s=(0.5, 4.0)),
    )


class Bucket:
    """One bucket, its keys, and its faults. One thread."""

    def __init__(self, folder: Path) -> None:
        """Start it."""
        folder.mkdir()
        self.keys_file = folder / "keys.json"
        self._tokens = 0
        self._expired: list[str] = []
        self._faults: list[str] = []
        self._write_keys()
        self._stack = ExitStack()
        self._server = self._stack.enter_context(start_part(_SERVER, {"objects_max": OBJECTS_MAX}))
        self.port: int = self._server.answer()

    def close(self) -> None:
        """Kill the server."""
        self._stack.close()

    def begin(self, fault: Fault) -> int:
        """Do a fault; returns 1."""
        if fault.kind == "token_expired":
            self._expired.append(f"expired:{self._key}")
        else:
            self._faults.append(_FAULTS[fault.kind])
        self._tell()
        return 1

    def end(self, fault: Fault) -> None:
        """Take a fault back. A token that has expired stays so: there is another one."""
        if fault.kind == "token_expired":
            self._tokens += 1
            self._write_keys()
        else:
            self._faults.remove(_FAULTS[fault.kind])
            self._tell()

    @property
    def _key(self) -> str:
        return f"key-{self._tokens}"

    def _tell(self) -> None:
        # No tier has any token before these.
        self._server.ask(faults=[*self._faults, *self._expired[-8:]])

    def _write_keys(self) -> None:
        keys = {"Version": 1, "AccessKeyId": self._key, "SecretAccessKey": "secret"}
        write_whole(self.keys_file, lambda path: path.write_text(json.dumps(keys)))
