"""What is measured beside the tiers, where it is installed: ``fio`` and LMCache.

``fio`` is the usual yardstick of a disk, at the same block size and depth. LMCache's ``raw_block``
adapter has one preallocated file with a slot for each block, O_DIRECT, plain system calls; a job is
one task of its pools, which have as many threads as the other sides. It compares no digests. What
it holds is deleted after each round, while no clock runs: LMCache leaves that to a controller.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import warnings
from contextlib import suppress
from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Final

import torch
from typing_extensions import override

from kvtier.errors import KVTierError, Misuse, StoreFault
from kvtier.tools.bench.call_legs import STORE
from kvtier.tools.process_group import process_group
from stress.bench.disk_sides import DiskLeg, DiskSetup, DiskSide, Job

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

FIO: Final = "fio"
ENGINES: Final = ("io_uring", "libaio")  #: the first that the kernel lets it use
_PROBE_BYTES: Final = 1 << 20
_LOG_CHARACTERS: Final = 500

LMCACHE: Final = "lmcache"
_HEADER_BYTES: Final = 4096  #: its default, before each block
_INDEX_BYTES: Final = 64 << 20  #: for its checkpoints; by default 256 MiB


class FioFailed(KVTierError):
    """Raised when fio is missing or ends badly. The text ends with its output."""


class Fio:
    """Writes and reads one file of a leg's bytes in order, as many blocks at once as threads."""

    def __init__(self, setup: DiskSetup) -> None:
        """Find an engine that works. Raises ``FioFailed``."""
        program = shutil.which("fio")
        if program is None:
            raise FioFailed("fio not found. Install it for its column: apt-get install fio.")
        self._program = program
        self._setup = setup
        self.folder = setup.folder / FIO
        self.folder.mkdir()
        size = max(_PROBE_BYTES, setup.memory.block_bytes)
        for self._engine in ENGINES:
            with suppress(FioFailed):
                self._move("write", size, "probe")
                return
        raise FioFailed(f"fio runs with none of {', '.join(ENGINES)}")

    def run(self, kind: str) -> DiskLeg:
        """Write or read the file once. It has no jobs to be timed."""
        direction = "write" if kind == STORE else "read"
        found = self._move(direction, self._setup.leg_bytes, "file")
        return DiskLeg(found["io_bytes"] / found["bw_bytes"], [], 0.0, None)

    def __str__(self) -> str:
        """Return what it calls itself, and how it runs."""
        return f"{self._run('--version').strip()}, {self._engine}, depth {self._setup.threads}"

    def _move(self, direction: str, size: int, name: str) -> dict[str, Any]:
        text = self._run(
            "--name=bench",
            f"--filename={name}",
            f"--size={size}",
            f"--bs={self._setup.memory.block_bytes}",
            f"--rw={direction}",
            f"--direct={int(self._setup.takes_direct)}",
            f"--ioengine={self._engine}",
            f"--iodepth={self._setup.threads}",
            "--fallocate=posix",
            "--output-format=json",
        )
        found: dict[str, Any] = json.loads(text[text.index("{") :])["jobs"][0][direction]
        return found

    def _run(self, *arguments: str) -> str:
        """Run it to its end, return its stdout. It is killed if this call is left otherwise."""
        fio = process_group(
            [self._program, *arguments],
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        with fio as process:
            output, errors = (each.decode(errors="replace") for each in process.communicate())
        if process.returncode:
            said = f"{output}{errors}".strip()[-_LOG_CHARACTERS:]
            raise FioFailed(f"fio ended with status {process.returncode}: {said}")
        return output


def lmcache_version() -> str:
    """Return what is installed. Raises ``Misuse`` if it isn't, or can't be imported."""
    try:
        import_module("lmcache_rust_raw_block_io")  # what does its I/O, a package of its own
        _import_adapter()
        return f"LMCache {version('lmcache')}"
    except ImportError as missing:
        raise Misuse(
            f"--beside {LMCACHE}: {sys.executable} can't import it ({missing}). Run "
            "pip install lmcache lmcache-rust-raw-block-io, or leave out --beside."
        ) from None


class LMCacheSide(DiskSide):
    """A file that has room for one leg."""

    def __init__(self, setup: DiskSetup) -> None:
        super().__init__(LMCACHE, setup)
        lmcache = _import_adapter()
        slot_bytes = setup.memory.block_bytes + _HEADER_BYTES
        self.folder.mkdir()
        path = self.folder / "raw_block"
        size = _INDEX_BYTES + setup.memory.slot_count * slot_bytes
        with path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, size)
        self._keys: list[Any] = []  # of all that it holds
        self._stores: dict[int, Job] = {}  # by LMCache's number of the task
        self._loads: dict[int, Job] = {}
        self._objects = [_memory_object(setup, slot) for slot in range(setup.memory.slot_count)]
        self._make_key: Callable[..., Any] = lmcache.ObjectKey
        self._adapter = lmcache.RawBlockL2Adapter(
            lmcache.RawBlockL2AdapterConfig(
                device_path=str(path),
                slot_bytes=slot_bytes,
                header_bytes=_HEADER_BYTES,
                meta_total_bytes=_INDEX_BYTES,
                use_odirect=self.is_direct,
                load_checkpoint_on_init=False,
                num_store_workers=setup.threads,
                num_load_workers=setup.threads,
            )
        )

    @override
    def submit(self, kind: str, job: Job) -> None:
        keys = [self._make_key(chunk_hash=key, model_name="bench", kv_rank=0) for key in job.keys]
        objects = [self._objects[slot] for slot in job.slots]
        if kind == STORE:
            self._keys += keys
            self._stores[self._adapter.submit_store_task(keys, objects)] = job
        else:
            self._loads[self._adapter.submit_load_task(keys, objects)] = job

    @override
    def ended(self) -> Sequence[int]:
        ended = []
        for task, stored in self._adapter.pop_completed_store_tasks().items():
            ended.append(self._stores.pop(task))
            _check(stored.is_successful(), ended[-1])
        for task in list(self._loads):
            loaded = self._adapter.query_load_result(task)
            if loaded is not None:
                ended.append(self._loads.pop(task))
                _check(loaded.popcount() == len(ended[-1].keys), ended[-1])
        return [job.number for job in ended]

    @override
    def forget(self) -> None:
        self._adapter.delete(self._keys)
        self._keys = []

    @override
    def close(self) -> None:
        self._adapter.close()


def _check(done: object, job: Job) -> None:
    if not done:
        raise StoreFault(f"LMCache failed job {job.number}; its log says why")


def _import_adapter() -> Any:  # noqa: ANN401 - LMCache has no stubs
    """Import the adapter's module: quietly, and without telling anyone of its use."""
    os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")
    os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what it imports
        return import_module("lmcache.v1.distributed.l2_adapters.raw_block_l2_adapter")


def _memory_object(setup: DiskSetup, slot: int) -> Any:  # noqa: ANN401 - LMCache has no stubs
    """Return LMCache's view of a slot."""
    memory: Any = import_module("lmcache.v1.memory_management")
    block = torch.frombuffer(setup.memory.view(slot), dtype=torch.uint8)
    told = memory.MemoryObjMetadata(
        shape=block.shape, dtype=block.dtype, address=slot, phy_size=block.nbytes, ref_count=1
    )
    return memory.TensorMemoryObj(block, told, None)
