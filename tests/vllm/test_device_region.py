"""The scheduler's mapping of vLLM's own region, which is what platforms with a device use.

vLLM's class maps memory on any machine; only the worker that copies needs the device.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvtier.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

PREFIX = "vllm_offload_"
ROW_BYTES = 65536
SLOTS = 3


class Engine:
    """The region as vLLM's worker of rank 0 maps it.

    Its ``engine_id`` names a folder, too, where no other test sweeps: a sweep locks what it reads.
    """

    def __init__(self, folder: Path) -> None:
        from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

        from kvtier.vllm.memory.region_header import HEADER_BYTES

        self.header_rows = -(-HEADER_BYTES // ROW_BYTES)
        self.path = folder / f"{PREFIX}rank.mmap"
        self.engine_id = f"{folder.name.removeprefix(PREFIX)}/{PREFIX}rank"
        self.worker: Any = SharedOffloadRegion(
            engine_id=self.engine_id,
            num_chunks=SLOTS + self.header_rows,
            rank=0,
            kv_bytes_per_chunk=ROW_BYTES,
            cpu_page_size=ROW_BYTES,
        )

    def scheduler_region(self) -> Any:
        """Return the scheduler's mapping, of one rank."""
        from kvtier.vllm.memory.device_region import DeviceRegion

        return DeviceRegion(
            self.engine_id,
            slot_count=SLOTS,
            row_bytes=ROW_BYTES,
            header_rows=self.header_rows,
            rank_bytes=ROW_BYTES,
            world_size=1,
        )

    def announce(self) -> None:
        """Leave what a worker leaves for the scheduler."""
        from kvtier.vllm.memory.device_region import HeaderMap

        mapped = HeaderMap(self.engine_id, SLOTS, ROW_BYTES)
        header = mapped.header(1)
        header.publish({"model": "m"})
        header.mark_mapped(0)
        mapped.close()


@pytest.fixture
def engine() -> Iterator[Engine]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix=PREFIX) as folder:
        engine = Engine(Path(folder))
        yield engine
        engine.worker.cleanup()


def test_the_scheduler_sees_the_workers_bytes_and_facts(engine: Engine) -> None:
    engine.announce()
    engine.worker.base_tensor[ROW_BYTES : ROW_BYTES + 4] = 7
    region = engine.scheduler_region()
    assert region.header.read() == {"model": "m"}
    assert len(region.rows) == SLOTS * ROW_BYTES
    assert bytes(region.rows[ROW_BYTES : ROW_BYTES + 4]) == b"\x07" * 4
    region.rows[0] = 9
    assert int(engine.worker.base_tensor[0]) == 9
    assert os.pread(region.fileno(), 1, 0) == b"\x09", "what a tier's process maps"
    region.close()
    region.close()


def test_the_name_goes_once_every_rank_has_mapped_the_region(engine: Engine) -> None:
    """vLLM leaves the file behind when an engine is killed (vllm#57303)."""
    region = engine.scheduler_region()
    assert not region.try_unlink()
    assert engine.path.exists()
    engine.announce()
    assert region.try_unlink()
    assert not engine.path.exists()
    assert region.try_unlink()
    region.close()


def test_a_vllm_that_removes_the_name_early_is_refused(engine: Engine) -> None:
    """The scheduler would create a file of its own, and wait for ranks that have another."""
    engine.path.unlink()
    with pytest.raises(ConfigError, match=r"removes its shared memory's name.*: use vLLM 0\."):
        engine.announce()


def test_a_name_that_is_another_engines_by_now_stays(engine: Engine) -> None:
    """An engine that starts under the same name must not lose its own memory."""
    engine.announce()
    first, second = engine.scheduler_region(), engine.scheduler_region()
    engine.path.unlink()  # by vLLM's own shutdown, say
    engine.path.write_bytes(b"another engine's")
    assert first.try_unlink()
    assert engine.path.read_bytes() == b"another engine's"
    first.close()
    second.close()
    assert engine.path.read_bytes() == b"another engine's"


def test_a_region_is_swept_once_no_process_has_it(engine: Engine) -> None:
    """A crash at the start leaves it: 4.4 MB in a trial, and for real all of the host memory.

    The next engine of this name would take it for its own, with the ranks that mapped it.
    """
    from kvtier.vllm.memory.region import sweep

    engine.announce()
    folder = str(engine.path.parent)
    assert sweep(folder) == []
    engine.worker._creator = False  # as if it were killed: the name stays
    engine.worker.cleanup()
    assert sweep(folder) == [engine.path]
