"""``stress.bench compression``: what it compares and reads. Never how fast anything is."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from kvtier.plugin_api.backend import Outcome
from kvtier.tools.cli.exit_status import BAD_INPUT
from stress.bench.__main__ import main
from stress.bench.compression import figures
from tests.support.printed import Reader, commands
from tests.support.redis_servers import running
from tests.unit.backends.fs._fs import BLOCK_BYTES, open_fs
from tests.unit.backends.shared._keys import OLD, key_file

if TYPE_CHECKING:
    from pathlib import Path


def report(path: Path) -> dict[str, Any]:
    assert main(["compression", "--json", str(path), "--rounds", "1", "--blocks", "2"]) == 0
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_every_way_is_measured_on_made_up_values(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = report(tmp_path / "report.json")
    assert found["bytes"] == 2 << 20
    ratios = {each["way"]: each["ratio"] for each in found["figures"]}
    assert max(ratios, key=lambda way: ratios[way]) == "bitplane-zstd"
    assert 1.4 < ratios["bitplane-zstd"] < 1.5
    assert "store, 100 MB/s" in capsys.readouterr().out


@pytest.mark.anyio
async def test_the_commands_of_the_page_measure_a_folder_and_a_server(tmp_path: Path) -> None:
    """With small sizes behind what is printed."""
    async with open_fs(tmp_path / "kv") as fs:
        for number in range(3):
            assert await fs.store(number) is Outcome.DONE
    _, of_folder, of_tier = commands("explanation/compression.md")
    with running("valkey", tmp_path / "server") as server:
        instead = {"/mnt/kv": str(tmp_path / "kv"), "redis://cache:6379": server.url}
        reader = Reader(tmp_path / "reader", instead)
        reader.run(f"{of_folder} --rounds 1 --blocks 2 --json report.json")
        small = "--rounds 1 --block-bytes 64KiB --bytes 8MiB"
        assert "compressed" in reader.run(f"{of_tier} {small}")
    found = json.loads((reader.folder / "report.json").read_text())
    assert (found["blocks"], found["bytes"]) == (2, 2 * BLOCK_BYTES)
    assert found["origin"] == str(tmp_path / "kv")
    reader.check_all_is_used()


@pytest.mark.anyio
@pytest.mark.parametrize("how", ["compression", "encryption_key_file"])
async def test_blocks_that_are_not_as_they_were_are_left_out(
    how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = key_file(tmp_path / "keys", OLD)
    options = {how: "bitplane-zstd" if how == "compression" else keys}
    async with open_fs(tmp_path / "kv", **options) as fs:
        await fs.store(1)
    assert main(["compression", "--folder", str(tmp_path / "kv")]) == BAD_INPUT
    assert "neither compressed nor encrypted" in capsys.readouterr().err


def test_a_link_gains_what_is_slower_of_its_bytes_and_the_threads() -> None:
    gains = figures("any", 1.5, [800.0], [2000.0])["gains"]
    assert gains["store, 100 MB/s"] == [1.5, 1.5]
    assert gains["store, 1,000 MB/s"] == [0.8, 1.5]
    assert gains["load, 1,000 MB/s"] == [1.5, 1.5]
