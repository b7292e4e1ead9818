"""A folder that others may write to: with keys, nothing that they put there is served."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from kvtier.errors import ConfigError
from kvtier.plugin_api.backend import Outcome, block_digest
from kvtier_backends.fs.forms import encode_trailer
from tests.unit.backends.fs._fs import (
    BLOCK_BYTES,
    FILE_BYTES,
    data_of,
    key_of,
    make_fs,
    open_fs,
)
from tests.unit.backends.shared._keys import OLD, key_file

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.anyio
BOTH_KINDS = pytest.mark.parametrize("option", ["auth_key_file", "encryption_key_file"])


def planted_plain(number: int, data: bytes) -> bytes:
    """Return the file that anyone can make who knows the format of plain files."""
    key = key_of(number)
    return data + encode_trailer(key, BLOCK_BYTES, block_digest(key, memoryview(data)))


async def test_without_keys_a_planted_file_is_served(tmp_path: Path) -> None:
    """That is what the docs say, and why there are keys."""
    async with open_fs(tmp_path / "kv") as fs:
        await fs.store(1)
        fs.path(1).write_bytes(planted_plain(1, data_of(66)))
        with pytest.raises(AssertionError):
            await fs.load(1)  # insists on the right bytes


async def test_with_keys_a_file_without_any_trailer_is_no_block(tmp_path: Path) -> None:
    keys = key_file(tmp_path / "keys", OLD)
    async with open_fs(tmp_path / "kv", auth_key_file=keys) as fs:
        await fs.store(1)
        fs.path(1).write_bytes(data_of(1))
        assert not await fs.probe(1)
        assert await fs.load(1) is Outcome.ABSENT


async def test_engines_with_and_without_keys_use_folders_side_by_side(tmp_path: Path) -> None:
    """Otherwise each would remove what it takes for planted, and store it again."""
    keys = key_file(tmp_path / "keys", OLD)
    async with (
        open_fs(tmp_path / "kv") as plain,
        open_fs(tmp_path / "kv", auth_key_file=keys) as signed,
        open_fs(tmp_path / "kv", encryption_key_file=keys) as encrypted,
    ):
        for each in (plain, signed, encrypted):
            assert await each.load(1) is Outcome.ABSENT
            assert await each.store(1) is Outcome.DONE
        assert len({each.path(1) for each in (plain, signed, encrypted)}) == 3
        for each in (plain, signed, encrypted):
            assert await each.load(1) is Outcome.DONE
            assert each.backend.counters() == {}
            raw = each.path(1).read_bytes()
            assert len(raw) == FILE_BYTES
            assert (data_of(1)[:16] in raw) == (each is not encrypted)
    written = [json.loads(each.read_text()) for each in (tmp_path / "kv").glob("*/config.json")]
    protections = {each["facts"].get("protection") for each in written}
    assert protections == {None, "signed", "encrypted"}


async def test_what_was_stored_before_there_were_keys_is_served_without_them(
    tmp_path: Path,
) -> None:
    """The form of plain files is what it has been."""
    async with open_fs(tmp_path / "kv") as fs:
        await fs.store(1)
        assert fs.path(1).read_bytes() == planted_plain(1, data_of(1))
        assert await fs.load(1) is Outcome.DONE


@BOTH_KINDS
@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"layout": "vllm"}, r"layout='vllm'.*Set layout to .kvtier., or remove the keys"),
        ({"allow_unchecksummed": True}, r"allow_unchecksummed=True.*Remove it, or the keys"),
    ],
)
async def test_keys_are_refused_where_blocks_would_be_served_that_nobody_vouches_for(
    option: str, options: dict[str, str], names: str, tmp_path: Path
) -> None:
    keys = key_file(tmp_path / "keys", OLD)
    with pytest.raises(ConfigError, match=names):
        make_fs(tmp_path / "kv", **options, **{option: keys})
    assert not (tmp_path / "kv").exists()
