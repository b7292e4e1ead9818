"""The two sides of ``stress.bench lmcache``: what each stores in, its server, its processes.

``processes`` are all that the benchmark has started, the engine's among them.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from stress.bench.sides import KVTIER, PATIENT, kvtier_tier
from stress.ports import HOST, HeldPort
from stress.remote.valkey_server import ValkeyServer
from stress.resources import SHARED_MEMORY
from stress.runtime.processes import call_of, children, living
from stress.server_process import ServerProcess

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence

LMCACHE: Final = "lmcache"
DISK_TIER, REDIS_TIER = "disk", "redis"
DRAM_BYTES: Final = 256 << 20
QUIET_S: Final = 1.0  #: in which nothing more is stored, at the end of it
START_TIMEOUT_S: Final = 120.0
DAMAGED_BYTES: Final = 16 << 10  #: of each
DAMAGED_EVERY_BYTES: Final = 64 << 10


class Storage:
    """What is below DRAM: a folder, or a Valkey server in memory."""

    def __init__(self, folder: Path, valkey: ValkeyServer | None) -> None:
        self.folder = folder
        self.valkey = valkey

    @classmethod
    @contextmanager
    def open(cls, tier: str, place: Path) -> Iterator[Storage]:
        """Have it while the block runs."""
        folder = place / "blocks"
        folder.mkdir()
        if tier == DISK_TIER:
            yield cls(folder, None)
            return
        valkey = ValkeyServer(place / "valkey", {})
        try:
            valkey.start()
            yield cls(folder, valkey)
        finally:
            valkey.end()

    def used_bytes(self) -> int:
        """Return how much it holds."""
        if self.valkey is None:
            files = (each for each in self.folder.rglob("*") if each.is_file())
            return sum(512 * each.stat().st_blocks for each in files)
        with self.valkey.client() as client:
            return int(client.info("memory")["used_memory_dataset"])

    def settle(self) -> None:
        """Wait until nothing more is stored."""
        used, since_s = -1, 0.0
        while (now := self.used_bytes()) != used or time.monotonic() - since_s < QUIET_S:
            if now != used:
                used, since_s = now, time.monotonic()
            time.sleep(QUIET_S / 10)


class KVTierSide:
    """kvtier's tier, whose process the engine starts, and starts again."""

    engine_marks = "vllm_offload_bench-|kvtier-"  #: names in shared memory of its engine's
    marks = engine_marks  #: of all of it

    def __init__(self, storage: Storage, asked: argparse.Namespace) -> None:
        self.storage = storage
        if storage.valkey is None:
            tier = kvtier_tier(DISK_TIER, storage.folder)
        else:
            tier = {"type": REDIS_TIER, "url": f"redis://{HOST}:{storage.valkey.port}", **PATIENT}
        self.job = {
            "extra_config": {
                "spec_name": "KVTierOffloadingSpec",
                "spec_module_path": "kvtier.vllm",
                "load_policy": "always",
                "on_reset": "keep",
                "cpu_bytes_to_use": DRAM_BYTES,
                "block_size": asked.block_tokens,
                "secondary_tiers": [tier],
            }
        }

    def kill_server(self) -> str:
        """Kill the tier's process; what it leaves in shared memory."""
        before = _names()
        for pid in processes():
            if any(argument.startswith(b"kvtier-") for argument in call_of(pid)):
                os.kill(pid, signal.SIGKILL)
        return left_in_shared_memory(self.marks, before)

    def start_server(self) -> None:
        """Do nothing, as the next two: the engine starts its tiers."""

    restart_server = end_server = start_server


class LMCacheSide:
    """LMCache's server, in a process of its own."""

    engine_marks = "vllm_offload_bench-"

    def __init__(self, storage: Storage, asked: argparse.Namespace) -> None:
        self.storage = storage
        self._held = HeldPort()
        self.job = {
            "connector": "LMCacheMPConnector",
            "imports_numba": True,
            "extra_config": {"lmcache.mp.host": HOST, "lmcache.mp.port": self._held.number},
        }
        if storage.valkey is None:
            adapter = {"type": asked.l2, "base_path": str(storage.folder)}
        else:
            adapter = {"type": "resp", "host": HOST, "port": storage.valkey.port}
        self._shared = f"bench-{os.getpid()}"
        self.marks = self._shared
        arguments = [
            *(sys.executable, "-W", "ignore", "-m", "lmcache.v1.multiprocess.server"),
            *("--host", HOST, "--port", str(self._held.number)),
            *("--chunk-size", str(asked.block_tokens), "--l1-size-gb", str(DRAM_BYTES / 2**30)),
            *("--no-l1-use-lazy", "--eviction-policy", "LRU", "--shm-name", self._shared),
            # As on any device but CUDA's and NPU's: the engine's worker copies, to shared memory.
            *("--supported-transfer-mode", "engine_driven"),
            *("--disable-metrics", "--l2-adapter", json.dumps(adapter)),
        ]
        self._server = ServerProcess(
            "LMCache's server",
            arguments,
            self._held.number,
            storage.folder.parent / "server.log",
            START_TIMEOUT_S,
        )

    def start_server(self) -> None:
        """Start it, and wait until it listens. Raises ``Failure`` if it doesn't."""
        self._server.start()

    def kill_server(self) -> str:
        """Kill it; what it leaves in shared memory."""
        self._server.kill()
        return left_in_shared_memory(self.marks)

    def end_server(self) -> None:
        """Have it end by itself."""
        process = self._server.process
        if process is not None:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(START_TIMEOUT_S)
        self.kill_server()

    def restart_server(self) -> None:
        """End it and start it again: its DRAM is lost."""
        self.end_server()
        self.start_server()

    def close(self) -> None:
        """End it for good."""
        self.kill_server()
        self._held.release()
        for name in _names():
            if self._shared in name:  # after a kill nobody else removes it
                (SHARED_MEMORY / name).unlink(missing_ok=True)


Side = KVTierSide | LMCacheSide


@contextmanager
def open_side(name: str, storage: Storage, asked: argparse.Namespace) -> Iterator[Side]:
    """Have a side, and LMCache's server running, while the block runs."""
    if name == KVTIER:
        yield KVTierSide(storage, asked)
        return
    side = LMCacheSide(storage, asked)
    try:
        side.start_server()
        yield side
    finally:
        side.close()


def processes() -> list[int]:
    """Return all processes that this one has started, and those that they have."""
    sessions = set(children())
    return [pid for pid, _, session in living() if session in sessions]


def processor_s() -> float:
    """Return the processor time of these processes until now."""
    return sum(_seconds_of(pid) for pid in processes())


def _seconds_of(pid: int) -> float:
    with suppress(FileNotFoundError, ProcessLookupError):
        return seconds_in(Path(f"/proc/{pid}/stat").read_text(), os.sysconf("SC_CLK_TCK"))
    return 0.0


def seconds_in(stat: str, ticks_per_s: int) -> float:
    """Return the processor time in a process's ``stat``, and of children that have ended."""
    return sum(map(int, stat.rpartition(")")[2].split()[11:15])) / ticks_per_s


def memory_mib(pid: int) -> float:
    """Return a process's proportional set size: of shared pages, its share."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return pss_in(Path(f"/proc/{pid}/smaps_rollup").read_text())
    return 0.0


def pss_in(rollup: str) -> float:
    """Return the MiB in a process's ``smaps_rollup``."""
    found = re.search(r"^Pss: +(\d+) kB$", rollup, re.MULTILINE)
    assert found is not None
    return int(found[1]) / 1024


def _names() -> set[str]:
    return {each.name for each in SHARED_MEMORY.iterdir()}


def left_in_shared_memory(marks: str, before: Sequence[str] | set[str] = ()) -> str:
    """Return in words what there is in shared memory with one of these names."""
    names = [name for name in sorted(_names() - set(before)) if re.search(marks, name)]
    held = 0
    for name in names:
        with suppress(FileNotFoundError):
            held += 512 * (SHARED_MEMORY / name).stat().st_blocks
    return f"{len(names)} names, {held >> 20} MiB" if names else "nothing"


def damage(folder: Path) -> None:
    """Overwrite a quarter of each 64 KiB of all files, but for the first and last ones."""
    noise = random.Random(folder.name).randbytes(DAMAGED_BYTES)
    for path in sorted(each for each in folder.rglob("*") if each.is_file()):
        size = path.stat().st_size
        with path.open("r+b") as file:
            for offset in range(
                DAMAGED_EVERY_BYTES // 2, size - DAMAGED_BYTES, DAMAGED_EVERY_BYTES
            ):
                file.seek(offset)
                file.write(noise)
