"""What a release has stored is read by all later ones, or the version of its format has changed.

``kept`` has folders as a release left them, each an archive. A change of a format that keeps its
version fails here. One that raises the version gets archives of its own, beside the old ones, which
then show what becomes of old blocks.

``WRITE_KEPT=1 pytest`` makes the archives that are missing, and no other ones.
"""

from __future__ import annotations

import os
import tarfile
from pathlib import Path
from typing import Any

import pytest

from kvtier.plugin_api.backend import Outcome
from kvtier.recording.recorder import Record, Recorder
from kvtier.tools.replay.traces import read_trace
from tests.support.patience import PATIENCE_S
from tests.unit.backends.disk._disk import key_options, open_disk
from tests.unit.backends.fs._fs import open_fs
from tests.unit.backends.shared._keys import block_of, loaded, made, stored

KEPT = Path(__file__).with_name("kept")
BLOCKS = range(1, 4)
KEY = "11" * 32
FS: dict[str, dict[str, Any]] = {
    "fs-plain": {},
    "fs-signed": {"auth_key_file": "keys"},
    "fs-encrypted": {"encryption_key_file": "keys"},
    "fs-compressed": {"compression": "bitplane-zstd"},
    "fs-bounded": {"capacity_bytes": 64 << 20},
}


def options_in(folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options with the file of keys in this folder."""
    path = key_options(folder, KEY)["encryption_key_file"]
    return {name: path if value == "keys" else value for name, value in options.items()}


async def write_disk(folder: Path, **options: Any) -> None:
    async with open_disk(folder / "kv", **options) as disk:
        assert await disk.store(*BLOCKS) == [Outcome.DONE] * len(BLOCKS)


async def read_disk(folder: Path, **options: Any) -> None:
    async with open_disk(folder / "kv", **options) as disk:
        assert await disk.found(BLOCKS) == [*BLOCKS]


async def write_fs(folder: Path, **options: Any) -> None:
    async with open_fs(folder / "kv", **options) as fs:
        assert [await fs.store(number) for number in BLOCKS] == [Outcome.DONE] * len(BLOCKS)


async def read_fs(folder: Path, **options: Any) -> None:
    async with open_fs(folder / "kv", **options) as fs:
        assert [await fs.load(number) for number in BLOCKS] == [Outcome.DONE] * len(BLOCKS)


RECORDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "signed": {"auth_key_file": "keys"},
    "encrypted": {"encryption_key_file": "keys"},
}


async def write_records(folder: Path) -> None:
    """Blocks as ``redis``, ``s3`` and ``mooncake`` store them."""
    (folder / "kv").mkdir()
    for name, options in RECORDS.items():
        payload, trailer = stored(made(**options_in(folder, options)), block_of(1))
        (folder / "kv" / name).write_bytes(payload)
        (folder / "kv" / f"{name}.trailer").write_bytes(trailer)


async def read_records(folder: Path) -> None:
    for name, options in RECORDS.items():
        parts = [(folder / "kv" / f"{name}{end}").read_bytes() for end in ("", ".trailer")]
        records = made(**options_in(folder, options))
        assert loaded(records, *parts) == bytes(block_of(1).buffer), name


async def write_trace(folder: Path) -> None:
    """Write a record of requests, as ``record`` makes it."""
    (folder / "kv").mkdir()
    recorder = Recorder(str(folder / "kv/record"), 1 << 20, block_tokens=32, tiers=["0:primary"])
    keys = [bytes([number]) * 36 for number in BLOCKS]
    recorder.add(Record(10.0, 10.5, 12.0, 100, 7, 0, (), {}, keys), len(keys))
    recorder.start()
    recorder.close(PATIENCE_S)


async def read_trace_again(folder: Path) -> None:
    (request,) = read_trace(str(folder / "kv/record")).requests
    assert len(request.blocks) == len(BLOCKS)


FORMATS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "disk-1": (write_disk, read_disk, {}),
    "disk-1-encrypted": (write_disk, read_disk, {"encryption_key_file": "keys"}),
    **{f"{name}-1": (write_fs, read_fs, options) for name, options in FS.items()},
    "records-1": (write_records, read_records, {}),
    "trace-1": (write_trace, read_trace_again, {}),
}


@pytest.mark.anyio
@pytest.mark.parametrize("name", FORMATS)
async def test_what_a_release_stored_is_read(name: str, tmp_path: Path) -> None:
    write, read, options = FORMATS[name]
    archive = KEPT / f"{name}.tar.xz"
    if not archive.exists() and os.environ.get("WRITE_KEPT"):
        made_in = tmp_path / "made"
        made_in.mkdir()
        await write(made_in, **options_in(made_in, options))
        with tarfile.open(archive, "w:xz") as kept:
            kept.add(made_in / "kv", "kv")
    with tarfile.open(archive) as kept:
        kept.extractall(tmp_path, filter="data")
    await read(tmp_path, **options_in(tmp_path, options))
