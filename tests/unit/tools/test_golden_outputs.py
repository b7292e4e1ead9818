"""Outputs of the commands on storage and configurations, compared with the files in ``golden``.

A command's words and figures are what scripts and people read: they change on purpose only.
``WRITE_GOLDEN=1 pytest tests/unit/tools/test_golden_outputs.py`` writes the files again.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtier.plugin_api.backend import Connection, Namespace
from kvtier.tools.cli.exit_status import BAD_INPUT
from kvtier.tools.cli.main import main
from tests.support.redis_servers import running
from tests.support.s3_server import moto_server, options_for, set_credentials
from tests.unit.backends.disk._disk import OTHER_CONTEXT, open_disk
from tests.unit.backends.fs import _fs
from tests.unit.backends.redis import _redis
from tests.unit.backends.s3._s3 import open_s3

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

GOLDEN = Path(__file__).parent / "golden"
FP8 = Namespace({"model_name": "org/m", "dtype": "fp8"})

# What differs from run to run, but does not belong to what a command says.
_CHANGING = (
    (re.compile(r"(?<![\w.])[\d.,]+ (s|min|h|d)(?!\w)"), "AGE"),
    (re.compile(r'("\w*(?:oldest|newest|made)_s": )\d+'), r"\1TIME"),
    (re.compile(r"127\.0\.0\.1:\d+"), "HOST"),
    (re.compile(r"(?<=\S)  +"), "  "),
    (re.compile(r"─+"), "─"),
    (re.compile(r"^( (?:lru|arc|MIN)  .*  )[\d.]+ *$", re.MULTILINE), r"\1SECONDS"),
    (re.compile(r"((?:GiB on disk  |bytes_on_disk\": ))[\d.]+"), r"\1BYTES"),
    (re.compile(r"(Types that can be listed: )[\w, ]+"), r"\1TYPES"),
    (re.compile(r" +$", re.MULTILINE), ""),
)

FOLDER_COMMANDS = (
    ("ls",),
    ("fsck",),
    ("purge", "--namespace", "zz"),
    ("purge", "--older-than", "7d", "--dry-run"),
    ("purge", "--dead", "--dry-run"),
    ("evict", "--capacity", "1GiB"),
    ("DAMAGE",),
    ("fsck",),
    ("fsck", "--repair"),
    ("purge", "--all", "--dry-run"),
    ("purge", "--all"),
    ("ls",),
)


class Recorder:
    """Runs commands and keeps what they print, without what differs from run to run."""

    def __init__(self, capsys: pytest.CaptureFixture[str], *places: str) -> None:
        self._capsys = capsys
        self._places = places
        capsys.readouterr()
        self.text = ""

    def run(self, *command: str) -> None:
        """Run it for people and, if it changes nothing and is not refused, for ``--json -``."""
        status = self._run(command)
        changes_nothing = command[0] in ("ls", "fsck", "check") or "--dry-run" in command
        if status != BAD_INPUT and changes_nothing and "--repair" not in command:
            self._run((*command, "--json", "-"))

    def _run(self, command: tuple[str, ...]) -> int:
        status = main([*command])
        captured = self._capsys.readouterr()
        text = f"$ kvtier {' '.join(command)}\n{captured.out}{captured.err}[{status}]\n\n"
        for place in self._places:
            text = text.replace(place, "PLACE")
        for pattern, instead in _CHANGING:
            text = pattern.sub(instead, text)
        self.text += text
        return status

    def compare(self, name: str) -> None:
        """Compare with the file of this name, or write it."""
        path = GOLDEN / f"{name}.txt"
        if os.environ.get("WRITE_GOLDEN"):
            path.write_text(self.text)
        assert self.text == path.read_text()


def run_over_folder(recorder: Recorder, folder: Path, damage: Callable[[], None]) -> None:
    for name, *options in FOLDER_COMMANDS:
        if name == "DAMAGE":
            damage()
        else:
            recorder.run(name, str(folder), *options)


def test_outputs_over_a_disk_tiers_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "kv"

    async def fill() -> None:
        async with open_disk(folder) as disk:
            await disk.store(*range(20))
            await disk.come_to_rest()
        async with open_disk(folder, OTHER_CONTEXT) as disk:
            await disk.store(*range(7))
            await disk.come_to_rest()

    def damage() -> None:
        """Of the first block of the file that has any, a bit."""
        with (folder / "segment-00000.kv").open("r+b") as file:
            at = file.read().index((3).to_bytes(8, "big") * 8)
            file.seek(at)
            file.write(b"\xff")

    asyncio.run(fill())
    recorder = Recorder(capsys, str(folder))
    run_over_folder(recorder, folder, damage)
    (folder / "superblock").unlink()
    for command in (("ls",), ("purge", "--all"), ("fsck",), ("fsck", "--repair")):
        recorder.run(command[0], str(folder), *command[1:])
    recorder.compare("disk")


def test_outputs_over_an_fs_tiers_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "kv"

    async def fill() -> None:
        for context, blocks in ((_fs.CONTEXT, 20), (replace(_fs.CONTEXT, namespace=FP8), 7)):
            async with _fs.open_fs(folder, context) as fs:
                for number in range(blocks):
                    await fs.store(number)
                    os.utime(fs.path(number), (1e9, 1e9))

    def damage() -> None:
        path, *_ = sorted(folder.rglob(f"{_fs.key_of(3).hex()}.kv"))
        os.truncate(path, 100)

    asyncio.run(fill())
    recorder = Recorder(capsys, str(folder))
    run_over_folder(recorder, folder, damage)
    recorder.compare("fs")


def test_outputs_over_redis_servers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEST_REDIS_PASSWORD", "open sesame")

    async def fill(url: str) -> None:
        for context, blocks in ((_redis.CONTEXT, 7), (replace(_redis.CONTEXT, namespace=FP8), 3)):
            async with _redis.open_redis(url, context, password_env="TEST_REDIS_PASSWORD") as tier:
                await tier.until(Connection.UP)
                await tier.store(*range(blocks))

    with running("valkey", tmp_path / "server", "--requirepass", "open sesame") as server:
        asyncio.run(fill(server.url))
        entry = {"type": "redis", "url": server.url, "password_env": "TEST_REDIS_PASSWORD"}
        recorder = Recorder(capsys, server.url)
        run_over_servers(recorder, entry)
    recorder.compare("redis")


def test_outputs_over_a_bucket(capsys: pytest.CaptureFixture[str]) -> None:
    set_credentials()

    async def fill(endpoint: str) -> None:
        async with open_s3(endpoint, "p") as tier:
            await tier.store(*range(7))

    with moto_server() as server:
        asyncio.run(fill(server.endpoint))
        recorder = Recorder(capsys, server.endpoint)
        run_over_servers(recorder, {"type": "s3", **options_for(server.endpoint, "p")})
    recorder.compare("s3")


def run_over_servers(recorder: Recorder, entry: dict[str, Any]) -> None:
    place = json.dumps(entry)
    recorder.run("ls", place)
    recorder.run("purge", place, "--namespace", "zz")
    recorder.run("purge", place, "--older-than", "7d", "--dry-run")
    recorder.run("purge", place, "--all", "--dry-run")
    recorder.run("purge", place, "--all")
    recorder.run("ls", place)


def test_outputs_of_what_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("no folder")
    recorder = Recorder(capsys, str(tmp_path))
    for place in (*("absent", "file", "."), "ftp://host", "{", '{"type": "mooncake"}'):
        path = place if "{" in place or "://" in place else str(tmp_path / place)
        for command in (("ls",), ("fsck",), ("purge", "--all"), ("evict", "--capacity", "1GiB")):
            recorder.run(command[0], path, *command[1:])
    recorder.run("purge", str(tmp_path))
    recorder.run("purge", str(tmp_path), "--all", "--dead")
    recorder.run("purge", str(tmp_path), "--older-than", "1w")
    recorder.run("evict", str(tmp_path), "--capacity", "much")
    recorder.compare("refused")


def test_outputs_of_check_size_and_replay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {
        "spec_name": "KVTierOffloadingSpec",
        "spec_module_path": "kvtier.vllm",
        "cpu_bytes_to_use": "1MiB",
        "secondary_tiers": [{"type": "memory", "capacity_bytes": "1MiB"}],
    }
    (tmp_path / "kv.json").write_text(json.dumps(config))
    config["secondary_tiers"] = [
        {"type": "disc", "path": "/kv"},
        {"type": "redis", "uri": "redis://host"},
    ]
    (tmp_path / "bad.json").write_text(json.dumps(config))
    (tmp_path / "no.json").write_text("no json")
    lines = (
        {"timestamp": t, "input_length": 2048, "output_length": 1, "hash_ids": ids}
        for t, ids in enumerate(([1, 2, 3, 4], [5, 6, 7, 8], [1, 2, 3, 4], [1, 2, 9, 10]))
    )
    (tmp_path / "trace.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    recorder = Recorder(capsys, str(tmp_path))
    for name in ("kv.json", "bad.json", "no.json", "absent.json"):
        recorder.run("check", str(tmp_path / name), "--block-bytes", "4KiB")
    trace = str(tmp_path / "trace.jsonl")
    model = ("--layers", "32", "--kv-heads", "8", "--head-dim", "128", "--dtype", "bfloat16")
    recorder.run("size", *model)
    recorder.run("size", *model, "--trace", trace, "--capacities", "2,4", "--policy", "lru")
    recorder.run("replay", trace, "--policies", "lru,arc", "--capacities", "2,4")
    recorder.run("replay", trace, "--policies", "nobody")
    recorder.compare("others")
