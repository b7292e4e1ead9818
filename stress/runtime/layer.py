"""The runtime layer: the facade, real tiers, real threads, processes and files."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

from stress.contents import BLOCK_BYTES
from stress.runtime import clocks, files, memory_faults, processes
from stress.runtime.in_process import ENGINE_KINDS, TIMEOUTS, InProcess
from stress.runtime.residency import Residency
from stress.runtime.rest import Swept

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from stress.layer import Injector
    from stress.plan import Kind
    from stress.record import Record

FS, DISK = "2:fs", "3:stress_disk"


class RuntimeLayer(InProcess):
    """A memory tier, an ``fs`` tier and a ``disk`` tier, over an ordinary folder."""

    name: ClassVar[str] = "runtime"
    requests_min: ClassVar[int] = 10_000
    blocks_read_min: ClassVar[int] = 30_000
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
        faults: Sequence[tuple[Sequence[Kind], Injector]] = (
            (memory_faults.KINDS, memory_faults.MemoryFaults(record.injected)),
            (files.kinds(()), files.FolderFaults(self._folders, aside)),
            (processes.kinds(()), processes.ProcessFaults()),
            (clocks.KINDS, self._clocks),
        )
        self.who_does = {kind.name: does for kinds, does in faults for kind in kinds}
        self.sweeping = Swept(FS, self._folders[FS])
        self.residency = Residency(self._folders[FS], folder)
        yield

    def tiers(self, seed: int, policy: str) -> list[dict[str, Any]]:
        """Return the settings of the tiers."""
        del seed
        common = {**TIMEOUTS, "enable_kv_events": True, "on_unusable": "skip"}
        return [
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
        ]

    def clock(self) -> float:
        """Return a time that leaps."""
        return self._clocks.monotonic()
