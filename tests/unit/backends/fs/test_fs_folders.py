"""What the fs backend refuses at start, and how it names things."""

from __future__ import annotations

import errno
import json
import os
import shlex
import stat
import threading
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest
from structlog.testing import capture_logs

from kvtier.errors import ConfigError, Misuse, NamespaceMismatch
from kvtier.plugin_api.backend import BackendContext, Namespace
from kvtier.tools.cli.main import main
from kvtier_backends.fs import FsBackend
from kvtier_backends.fs.layout import make_layout
from kvtier_backends.fs.older_blocks import neighbours, report_older
from kvtier_backends.fs.temporary import parse_temporary_untrusted, this_writer
from tests.support.patience import until_true
from tests.unit.backends.fs._fs import CONTEXT, FILE_BYTES, key_of, make_fs, open_fs

OTHER_FACTS = {"model_name": "org/m", "dtype": "fp8"}


def refusal(root: Path | str, context: BackendContext = CONTEXT, **options: object) -> str:
    with pytest.raises(ConfigError) as caught:
        make_fs(root, context, **options)
    return str(caught.value)


def test_a_file_is_no_root(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    assert "Name a folder" in refusal(tmp_path / "file")
    assert "Name a folder" in refusal(tmp_path / "file" / "below")


def test_a_root_that_cannot_be_made_is_refused() -> None:
    text = refusal("/proc/kvtier")
    assert "root_dir='/proc/kvtier'" in text
    assert "Create it" in text


@pytest.mark.anyio
async def test_a_store_makes_only_the_folders_that_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each further call would be one more wait for the GIL, behind all threads that store."""
    made, real = list[str](), os.mkdir

    def mkdir(name: str, mode: int, *, dir_fd: int) -> None:
        made.append(name)
        real(name, mode, dir_fd=dir_fd)

    async with open_fs(tmp_path / "kv") as fs:
        inner = fs.path(1).parent
        inner.parent.mkdir()
        monkeypatch.setattr(os, "mkdir", mkdir)
        await fs.store(1)
        fs.path(1).unlink()
        await fs.store(1)
        assert made == [inner.name]
        assert fs.path(1).exists()


def test_a_start_says_which_blocks_a_disk_tier_stores_faster(tmp_path: Path) -> None:
    for block_bytes, is_small in ((128 << 10, True), (256 << 10, False)):
        with capture_logs() as logs:
            make_fs(tmp_path / f"{block_bytes}", replace(CONTEXT, block_bytes=block_bytes))
        found = [line for line in logs if "3 to 10 times as fast" in line["event"]]
        assert [line["block_bytes"] for line in found] == [block_bytes] * is_small


def test_what_a_start_leaves_when_it_is_killed_is_swept_one_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its names say who wrote it, as those of unfinished blocks do."""
    with monkeypatch.context() as killed:
        killed.setattr(os, "unlink", lambda *_, **__: None)
        make_fs(tmp_path / "probed")
        killed.setattr(os, "replace", refuse_to)
        refusal(tmp_path / "configured")
    left = [path.name for path in tmp_path.rglob("*.tmp")]
    assert len(left) == 2
    assert {parse_temporary_untrusted(name) for name in left} == {this_writer()}


def refuse_to(*_: object, **__: object) -> NoReturn:
    raise PermissionError(errno.EPERM, "not now", "config.json")


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o702])
def test_a_world_writable_root_is_refused(tmp_path: Path, mode: int) -> None:
    """Anyone could plant a block; a sticky bit does not keep them from it."""
    root = tmp_path / "kv"
    root.mkdir()
    root.chmod(mode)
    assert "chmod o-w" in refusal(root)


def test_a_world_writable_namespace_is_refused(tmp_path: Path) -> None:
    make_fs(tmp_path / "kv")
    (namespace,) = (tmp_path / "kv").iterdir()
    namespace.chmod(0o777)
    assert "chmod o-w" in refusal(tmp_path / "kv")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"layout": "flat"}, "layout='flat' must be one of kvtier, vllm"),
        ({"allow_unchecksummed": "yes"}, "allow_unchecksummed='yes'"),
        ({"n_read_threads": 0}, "n_read_threads=0"),
        ({"direct": "true"}, "direct='true'"),
        ({"n_reed_threads": 1}, "did you mean 'n_read_threads'"),
    ],
)
def test_bad_options_are_refused_by_name(
    tmp_path: Path, options: dict[str, object], words: str
) -> None:
    assert words in refusal(tmp_path, **options)


def test_a_missing_root_is_refused() -> None:
    with pytest.raises(ConfigError, match="root_dir is missing"):
        FsBackend.from_options({}, CONTEXT)


@pytest.mark.parametrize(
    ("layout", "folder", "file"), [("kvtier", 0o700, 0o600), ("vllm", 0o755, 0o644)]
)
@pytest.mark.anyio
async def test_new_folders_and_files_have_their_modes(
    tmp_path: Path, layout: str, folder: int, file: int
) -> None:
    async with open_fs(tmp_path / "new" / "kv", layout=layout) as fs:
        await fs.store(1)
        assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700
        assert stat.S_IMODE((tmp_path / "new" / "kv").stat().st_mode) == 0o700
        for path in (tmp_path / "new" / "kv").rglob("*"):
            wanted = folder if path.is_dir() else file
            assert stat.S_IMODE(path.stat().st_mode) == wanted, path


def test_the_namespace_is_written_down_in_plain_words(tmp_path: Path) -> None:
    make_fs(tmp_path / "kv")
    (config,) = (tmp_path / "kv").glob("org_m_????????????/config.json")
    assert json.loads(config.read_text()) == {
        "format": "kvtier-fs",
        "format_version": 1,
        "block_bytes": 16384,
        "facts": {"model_name": "org/m", "dtype": "bf16"},
    }
    make_fs(tmp_path / "kv")  # and again, without complaint
    assert [path.name for path in config.parent.iterdir()] == ["config.json"]


def test_a_folder_with_other_facts_is_refused(tmp_path: Path) -> None:
    make_fs(tmp_path / "kv")
    (config,) = (tmp_path / "kv").glob("*/config.json")
    config.write_text(config.read_text().replace("bf16", "fp8"))
    with pytest.raises(NamespaceMismatch, match=r"facts\.dtype is 'fp8'.*has 'bf16'"):
        make_fs(tmp_path / "kv")


def test_another_block_size_is_refused(tmp_path: Path) -> None:
    make_fs(tmp_path / "kv")
    with pytest.raises(NamespaceMismatch, match=r"block_bytes is 16384.*has 8192"):
        make_fs(tmp_path / "kv", replace(CONTEXT, block_bytes=8192))


@pytest.mark.parametrize("garbage", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000, b"1"])
def test_an_unreadable_config_is_refused(tmp_path: Path, garbage: bytes) -> None:
    make_fs(tmp_path / "kv")
    (config,) = (tmp_path / "kv").glob("*/config.json")
    config.write_bytes(garbage)
    assert "restore the file" in refusal(tmp_path / "kv")


def test_vllms_layout_needs_vllms_fields(tmp_path: Path) -> None:
    text = refusal(tmp_path, replace(CONTEXT, namespace=Namespace({})), layout="vllm")
    assert "layout='vllm'" in text
    assert "Set layout to 'kvtier'" in text


def test_a_relative_root_is_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert make_fs("kv").place == os.path.realpath(tmp_path / "kv")


def test_file_names_fit_for_every_key() -> None:
    """A file name ends at 255 bytes, and nothing in a key may leave the folder."""
    layout = make_layout("kvtier", "/r", CONTEXT)
    keys = [b"", b"\0", b"../../x", *(bytes([n]) * n for n in range(1, 256, 7)), key_of(1)]
    paths = {layout.path(key) for key in keys}
    assert len(paths) == len(keys)
    for path in paths:
        assert Path(path).parent.parent.parent == Path(layout.blocks)
        assert len(Path(path).name) < 255 - len(".0123456789ab-4194304-18446744073-99999999.tmp")


def test_a_key_too_short_for_vllm_is_misuse() -> None:
    with pytest.raises(Misuse):
        make_layout("vllm", "/r", CONTEXT).path(b"1234")


def facts_of(version: int, model: str = "org/m") -> BackendContext:
    return replace(CONTEXT, namespace=Namespace({"model_name": model, "format": version}))


@pytest.mark.anyio
async def test_a_start_says_once_what_an_older_kvtier_has_left(tmp_path: Path) -> None:
    """Its names say too little of the weights: nobody serves it, and nothing overwrites it."""
    root = tmp_path / "a 'kv'; b"
    for context in (facts_of(1), facts_of(1, "org/other"), facts_of(3)):
        async with open_fs(root, context) as fs:
            await fs.store(1)
    layout = make_layout("kvtier", str(root), facts_of(2))
    opened = os.open(root, os.O_PATH)
    names = neighbours(opened, layout)
    os.close(opened)
    assert len(names) == 2, "those of other models are not looked at"
    with capture_logs() as logs:
        report_older(str(root), layout, names, "1:fs", lambda: True)
    (line,) = logs
    (old,) = root.glob(f"{make_layout('kvtier', '', facts_of(1)).base_name}")
    assert line["folder"] == str(old)
    assert line["bytes"] == f"{FILE_BYTES:,}"
    _, *command = shlex.split(line["remove"])
    assert main([*command, "--dry-run"]) == 0
    assert main(command) == 0
    assert not list(old.rglob("*.kv"))
    report_older(str(tmp_path / "gone"), layout, names, "1:fs", lambda: True)


@pytest.mark.anyio
async def test_a_tier_looks_for_what_is_older_when_it_opens(tmp_path: Path) -> None:
    async with open_fs(tmp_path / "kv", facts_of(1)) as fs:
        await fs.store(1)
    with capture_logs() as logs:
        async with open_fs(tmp_path / "kv", facts_of(2)):
            await until_true(
                lambda: any("older kvtier" in line["event"] for line in logs), threading.enumerate
            )
