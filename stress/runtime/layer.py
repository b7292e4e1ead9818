"""The runtime layer: the facade, real tiers, real threads, processes and files."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Final

from stress.contents import BLOCK_BYTES
from stress.runtime import clocks, files, memory_faults, processes
from stress.runtime.in_process import ENGINE_KINDS, InProcess
from stress.runtime.quick_restarts import quick_restarts

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from stress.layer import Injector
    from stress.plan import Fault, Kind
    from stress.record import Record

FS, DISK = "2:fs", "3:stress_disk"
TIMEOUTS: Final = {"probe_timeout_s": 0.2, "promote_timeout_s": 0.5, "store_timeout_s": 2.0}
IMPATIENT: Final = {
    "breaker_pause_s": 0.02,
    "breaker_pause_s_max": 0.2,
    "lease_timeout_s": 2.0,
}
POLICIES: Final = ("reuse", "lru", "s3fifo", "arc", "lru2")


class RuntimeLayer(InProcess):
    """A memory tier, an ``fs`` tier and a ``disk`` tier, over an ordinary folder."""

    name: ClassVar[str] = "runtime"
    kinds: ClassVar[tuple[Kind, ...]] = (
        *ENGINE_KINDS,
        *memory_faults.KINDS,
        *files.kinds((FS, DISK)),
        *processes.kinds((FS, DISK)),
        *clocks.KINDS,
    )

    @contextmanager
    def world(self, folder: Path, record: Record) -> Iterator[None]:
        """Make the folders."""
        self._folders = {FS: folder / "fs", DISK: folder / "disk"}
        aside = folder / "aside"
        aside.mkdir()
        self._clocks = clocks.Clocks(folder)
        faults = (
            (memory_faults.KINDS, memory_faults.MemoryFaults(record.injected)),
            (files.kinds(()), files.FolderFaults(self._folders, aside)),
            (processes.kinds(()), processes.ProcessFaults()),
            (clocks.KINDS, self._clocks),
        )
        self._who_does: dict[str, Injector] = {
            kind.name: does for kinds, does in faults for kind in kinds
        }
        with quick_restarts():
            yield

    def settings(self, seed: int) -> Mapping[str, Any]:
        """Return the runtime's settings: the seed picks policies, cells, and what a reset means."""
        common = {**TIMEOUTS, "enable_kv_events": True, "on_unusable": "start_without"}
        policy = POLICIES[seed % len(POLICIES)]
        return {
            **IMPATIENT,
            "eviction_policy": policy,
            "on_reset": ("new_generation", "keep")[seed // 2 % 2],
            "secondary_tiers": [
                {
                    "type": "stress_memory",
                    "capacity_bytes": 96 * BLOCK_BYTES,
                    "eviction_policy": policy,
                    **common,
                },
                {
                    "type": "fs",
                    "root_dir": str(self._folders[FS]),
                    "n_read_threads": 4,
                    "n_write_threads": 4,
                    **common,
                },
                {
                    "type": "stress_disk",
                    "path": str(self._folders[DISK]),
                    "capacity_bytes": 2048 * BLOCK_BYTES,
                    **common,
                },
            ],
        }

    def clock(self) -> float:
        """Return a time that leaps."""
        return self._clocks.monotonic()

    def begin(self, fault: Fault) -> int:
        """Do a fault."""
        return self._who_does[fault.kind].begin(fault)

    def end(self, fault: Fault) -> None:
        """Take a fault back."""
        self._who_does[fault.kind].end(fault)


def make_layer(_arguments: object) -> RuntimeLayer:
    """Return the layer."""
    return RuntimeLayer()
