"""vLLM's own region, which platforms with a device use. Its last rows are kvtier's header.

vLLM's workers create and map it. The scheduler removes the file's name once all
ranks have mapped it, because vLLM would leave the file behind when an engine is killed.
An engine killed before that leaves the file; the next start removes it (``region.py``).
"""

from __future__ import annotations

import mmap
import os
from contextlib import suppress
from pathlib import Path

from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

from kvtier.errors import ConfigError
from kvtier.settings.host_memory import SHARED_MEMORY_FOLDER
from kvtier.vllm.memory.region import VLLMS_NAME, names
from kvtier.vllm.memory.region_header import HEADER_BYTES, RegionHeader
from kvtier.vllm.relied_on import REMEDY


class DeviceRegion:
    """The scheduler's mapping of vLLM's own region, on platforms with a device."""

    def __init__(
        self,
        engine_id: str,
        *,
        slot_count: int,
        row_bytes: int,
        header_rows: int,
        rank_bytes: int,
        world_size: int,
    ) -> None:
        """``row_bytes``: the size of a slot; ``rank_bytes``: one rank's share of it."""
        self._region: SharedOffloadRegion | None = SharedOffloadRegion(
            engine_id=engine_id,
            num_chunks=slot_count + header_rows,
            rank=None,
            kv_bytes_per_chunk=row_bytes,
            cpu_page_size=rank_bytes,
        )
        # int8 to bytes; a tensor has no buffer of its own.
        whole = memoryview(self._region.base_tensor.numpy().data).cast("B")
        end = slot_count * row_bytes
        self._rows = whole[:end]
        self.header = RegionHeader(whole[end:], world_size)
        whole.release()
        self._path: Path | None = region_path(engine_id)
        opened = self.fileno()
        # vLLM keeps the file open. If a release doesn't, the name led to this file a moment ago.
        self._identity = self._path.lstat() if opened is None else os.fstat(opened)

    @property
    def rows(self) -> memoryview:
        """All slots, one after the other."""
        return self._rows

    def fileno(self) -> int | None:
        """Return the descriptor of the file that vLLM holds open, if it does."""
        descriptor: int | None = getattr(self._region, "fd", None)
        return descriptor

    def try_unlink(self) -> bool:
        """Remove the name once all ranks have mapped it; return True once it is gone.

        vLLM's creator also removes it at shutdown, and only warns if it is already
        gone (vllm#57303: after SIGKILL it would stay).
        """
        if self._path is not None and self.header.all_mapped():
            self._unlink()
        return self._path is None

    def _unlink(self) -> None:
        """Remove the name if it is still this region's: another engine may have created its own."""
        path, self._path = self._path, None
        if path is not None and names(path, self._identity):
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """Release the memory. Safe to call twice."""
        region, self._region = self._region, None
        if region is None:
            return
        self._unlink()
        self._rows.release()
        self.header.release()
        region.cleanup()


class HeaderMap:
    """A worker's short-lived mapping of the last rows of vLLM's region, by its file's name.

    The scheduler needs the name, too, and would create another file if it were gone.
    """

    def __init__(self, engine_id: str, slot_count: int, row_bytes: int) -> None:
        path = region_path(engine_id)
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            raise ConfigError(
                f"{path} is gone, since this vLLM removes its shared memory's name before kvtier's "
                f"scheduler has mapped it: {REMEDY}."
            ) from None
        try:
            self._map = mmap.mmap(fd, HEADER_BYTES, offset=slot_count * row_bytes)
        finally:
            os.close(fd)
        self._header: RegionHeader | None = None

    def header(self, world_size: int) -> RegionHeader:
        """Return the header. It is released by ``close``."""
        self._header = RegionHeader(memoryview(self._map), world_size)
        return self._header

    def close(self) -> None:
        """Release the map."""
        if self._header is not None:
            self._header.release()
        with suppress(BufferError):
            self._map.close()


def region_path(engine_id: str) -> Path:
    """Return the path at which vLLM creates an engine's region."""
    return Path(SHARED_MEMORY_FOLDER) / VLLMS_NAME.format(engine_id)
