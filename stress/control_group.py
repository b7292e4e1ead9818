"""Limits the memory of processes as a container's limit does, by a control group."""

from __future__ import annotations

import time
import uuid
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from stress.limits import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Iterator

POLL_S: Final = 0.1


@contextmanager
def memory_group(limit_bytes: int) -> Iterator[Path | None]:
    """Make a control group with this limit; None where this machine does not let one be made."""
    for mount, limit in (
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes"),
        ("/sys/fs/cgroup", "memory.max"),
    ):
        folder = Path(mount) / f"kvtier-{uuid.uuid4()}"
        try:
            folder.mkdir()
            (folder / limit).write_text(str(limit_bytes))
        except OSError:
            with suppress(OSError):
                folder.rmdir()
            continue
        try:
            yield folder
        finally:
            _remove(folder)
        return
    yield None


def _remove(group: Path) -> None:
    """Remove a control group, once the processes that were killed in it have ended."""
    until_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < until_s:
        try:
            group.rmdir()
        except OSError:
            time.sleep(POLL_S)
        else:
            return
