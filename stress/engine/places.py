"""Where a run keeps what, and how its servers are configured."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from stress.engine.vllm_server import BLOCK_BYTES, ITS_OWN
from stress.engine.watch import DISK, FS

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

DRAM_BLOCKS: Final = 40
DISK_BLOCKS: Final = 256
FS_THREADS: Final = 4  #: readers, and writers: so few that all are there after the warm-up
GATE_LIMITS: Final = {"probe_timeout_s": 5.0, "promote_timeout_s": 10.0, "start_timeout_s": 300.0}
"""A tier that is stopped misses them, while nothing of the gate depends on one that is not: it is
asked again until it has served enough."""

GATE_BREAKERS: Final = {"breaker_pause_s": 0.1, "breaker_pause_s_max": 1.0}


@dataclass(frozen=True)
class Places:
    """One run's, below an empty folder."""

    folder: Path
    seed: int
    is_gate: bool = False

    @property
    def engine_id(self) -> str:
        """In the name of all that this run has in shared memory."""
        return f"kvtier-stress-{os.getpid()}-soak"

    @property
    def log(self) -> Path:
        """Of the server under faults, through all its restarts."""
        return self.folder / "log"

    @property
    def config_file(self) -> Path:
        """The configuration of the server under faults, as JSON."""
        return self.folder / "config.json"

    @property
    def models(self) -> Mapping[str, Path]:
        """Weights → the folder that they are in; all of one shape."""
        return {ITS_OWN: self.folder / "model", "others": self.folder / "other-weights"}

    @property
    def small(self) -> Path:
        """Where a small filesystem is mounted."""
        return self.folder / "small"

    @property
    def tiers(self) -> Mapping[str, Path]:
        """The tiers' folders."""
        return {DISK: self.folder / "disk", FS: self.small / "fs"}

    @property
    def asides(self) -> Mapping[str, Path]:
        """For each tier a folder on its filesystem, where its own is moved to."""
        return {DISK: self.folder / "aside", FS: self.small / "aside"}

    def config(self, *tiers: str) -> dict[str, Any]:
        """Return a configuration with these tiers, and the deadlines that everybody has."""
        known = {
            DISK: {
                "type": "disk",
                "path": str(self.tiers[DISK]),
                "capacity_bytes": DISK_BLOCKS * BLOCK_BYTES,
            },
            FS: {
                "type": "fs",
                "root_dir": str(self.tiers[FS]),
                "n_read_threads": FS_THREADS,
                "n_write_threads": FS_THREADS,
            },
        }
        limits = GATE_LIMITS if self.is_gate else {}
        return {
            "spec_name": "KVTierOffloadingSpec",
            "spec_module_path": "kvtier.vllm",
            "cpu_bytes_to_use": DRAM_BLOCKS * BLOCK_BYTES,
            "offload_prompt_only": False,
            "load_policy": "always",  # a fault that nobody meets shows nothing
            # Weights are changed with the first only; a kept generation is read more often.
            "on_reset": ("new_generation", "keep")[self.seed % 2],
            "secondary_tiers": [{**known[tier], **limits} for tier in tiers],
            **(GATE_BREAKERS if self.is_gate else {}),
        }
