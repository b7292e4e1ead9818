"""Another rank of an engine: a process that maps the region and waits to be released."""

from __future__ import annotations

import ctypes
import subprocess
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtier.vllm.memory.region import HostRegion
from tests.support.patience import until
from tests.vllm.support.children import Child, start_scenario

if TYPE_CHECKING:
    from collections.abc import Iterator

CLONE_NEWNS = 0x00020000
APART = [["mount", "--make-rprivate", "/"], ["mount", "-t", "tmpfs", "tmpfs", "/dev/shm"]]
"""What gives a process a shared memory of its own, once it has mounts of its own."""


@contextmanager
def mapping_rank(log_folder: Path, *, apart: bool = False, **region: Any) -> Iterator[Child]:
    """Start a process that maps ``HostRegion(**region)``; it has ended well at the end.

    ``apart``: as on another host, where ``/dev/shm`` is another.
    """
    mapped, release = log_folder / "mapped", log_folder / "let go"
    files = {"mapped": str(mapped), "release": str(release)}
    with start_scenario(hold_region, log_folder, {}, apart=apart, region=region, **files) as child:
        child.wait_for(mapped)
        yield child
        if not child.has_ended():
            release.touch()
            child.result()


def hold_region(*, apart: bool, region: dict[str, Any], mapped: str, release: str) -> None:
    """A scenario."""
    if apart:
        assert ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNS) == 0, ctypes.get_errno()
        for command in APART:
            subprocess.run(command, check=True)
    held = HostRegion(**region)
    Path(mapped).touch()
    until(Path(release).exists)
    held.close()
