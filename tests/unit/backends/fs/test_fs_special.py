"""What lies in a file's place and is none is named, and nobody waits for it."""

from __future__ import annotations

import os
import socket
import stat
from typing import TYPE_CHECKING

import pytest
from structlog.testing import capture_logs

from kvtier.errors import ConfigError
from kvtier.plugin_api.backend import Outcome
from tests.support.needs import needs
from tests.unit.backends.fs._fs import FILE_BYTES, key_of, make_fs, open_fs

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.anyio
DONE, FAILED, DAMAGED = Outcome.DONE, Outcome.FAILED, Outcome.DAMAGED


def put_special(path: Path, kind: str) -> None:
    path.unlink()
    if kind == "FIFO":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as end:
            where = os.open(path.parent, os.O_PATH)
            end.bind(f"/proc/self/fd/{where}/{path.name[:20]}")
            os.close(where)
        (path.parent / path.name[:20]).rename(path)
    elif kind == "link":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    else:
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))  # endless zeros


@pytest.mark.parametrize(
    "kind",
    [
        "FIFO",
        "socket",
        "link",
        "folder",
        pytest.param("device", marks=needs("root")),
    ],
)
@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("layout", ["kvtier", "vllm"])
async def test_what_is_no_file_is_a_miss_that_is_named_and_waits_for_nobody(
    tmp_path: Path, kind: str, layout: str, *, direct: bool
) -> None:
    async with open_fs(tmp_path / "kv", direct=direct, layout=layout, n_read_threads=1) as fs:
        assert await fs.store(1) is DONE
        assert fs.path(1).stat().st_size == FILE_BYTES
        put_special(fs.path(1), kind)
        with capture_logs() as lines:
            assert await fs.load(1) is DAMAGED
            assert await fs.store(1) is FAILED
        assert fs.count("blocks_damaged") == 1
        assert all(f"a {kind} lies where" in str(line["reason"]) for line in lines)
        await fs.backend.remove([key_of(1)])
        assert os.path.lexists(fs.path(1)), "it isn't ours"
        assert fs.temporaries() == []
        assert fs.backend.busy_threads() == 0


async def test_a_special_file_for_a_config_is_refused_by_name(tmp_path: Path) -> None:
    make_fs(tmp_path / "kv")
    (config,) = (tmp_path / "kv").glob("*/config.json")
    put_special(config, "FIFO")
    with pytest.raises(ConfigError, match=r"a FIFO lies where a file should be.*restore the file"):
        make_fs(tmp_path / "kv")


async def test_a_fifo_for_a_marker_keeps_no_engine_waiting(tmp_path: Path) -> None:
    async with open_fs(tmp_path / "kv") as fs:
        (marker,) = (tmp_path / "kv").glob("*/writers/*")
        put_special(marker, "FIFO")
        with pytest.raises(OSError, match="No such device"):
            fs.backend._files.announce()
