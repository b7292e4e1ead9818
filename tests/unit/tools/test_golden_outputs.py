"""What the commands print over storage and configurations, as ``golden`` has it: ``_transcript``.

Their words and figures are what scripts and people read: they change on purpose only.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from anyio.from_thread import start_blocking_portal

from kvtier.core.generations import Generations, mark_of_name, marked
from kvtier.plugin_api.backend import Connection, Namespace
from kvtier.tools.checking import places
from kvtier.tools.cli import purge
from kvtier_backends.disk import backend as disk_backend
from kvtier_backends.disk import format as fmt
from kvtier_backends.redis import offline as redis_offline
from kvtier_backends.s3 import client as s3_client
from kvtier_backends.shared.namespaces import namespace_name
from tests.support.redis_servers import running
from tests.support.s3_server import BUCKET, client_for, moto_server, options_for, set_credentials
from tests.unit.backends.disk._disk import CONTEXT, OTHER_CONTEXT, open_disk
from tests.unit.backends.fs import _fs
from tests.unit.backends.redis import _redis
from tests.unit.backends.s3 import _s3
from tests.unit.tools._transcript import Transcript

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.unit.backends.disk._disk import Disk

    MakeTranscript = Callable[..., Transcript]

FP8 = Namespace({"model_name": "org/m", "dtype": "fp8"})
ROPE = Namespace({"model_name": "org/m", "dtype": "bf16", "rope": {"rope_theta": 5.0}})
DAY_S = 86_400
KEYS = "11" * 32


@pytest.fixture
def transcript(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> MakeTranscript:
    return lambda places, parts=None: Transcript(capsys, monkeypatch, places, parts or {})


def keys_in(file: Path, mode: int = 0o600) -> str:
    file.write_text(KEYS)
    file.chmod(mode)
    return str(file)


def dead_key(key: bytes = bytes(36)) -> bytes:
    """Return what a block is called whose weights had no name: no engine finds it any more."""
    mark = Generations().begin(None)
    assert mark is not None
    return marked((key,), mark)[0]


# --- disk ---


class Engine:
    """A ``disk`` tier's engine, in a thread of its own, while it runs."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stack = ExitStack()
        self._disk: Disk

    def begin(self) -> None:
        self._portal = self._stack.enter_context(start_blocking_portal())
        opened = self._portal.wrap_async_context_manager(open_disk(self._folder))
        self._disk = self._stack.enter_context(opened)

    def end(self) -> None:
        self._stack.close()

    def store(self) -> list[str]:
        return [each.name for each in self._portal.call(self._disk.store, *range(100, 105))]

    def load(self) -> list[str]:
        return [each.name for each in self._portal.call(self._disk.load, 1, 100)]

    def lost(self) -> int:
        return len(self._disk.lost)


async def fill_disks(folder: Path, key_file: str) -> None:
    """Fill ``kv`` with two namespaces, ``old`` in the past and the future, and two encrypted."""
    for context, blocks in ((CONTEXT, 20), (OTHER_CONTEXT, 7)):
        async with open_disk(folder / "kv", context) as disk:
            await disk.store(*range(blocks))
            await disk.come_to_rest()
    async with open_disk(folder / "old") as disk:
        for ago_s, blocks in ((3 * 3600, range(5)), (0, range(5, 20)), (-7200, range(20, 25))):
            disk.clock.now_s = time.time() - ago_s
            await disk.store(*blocks)
    for name in ("encrypted", "cut"):
        async with open_disk(folder / name, encryption_key_file=key_file) as disk:
            await disk.store(*range(10))
            cut_at = disk.backend._plan.geometry.slots_at - fmt.PAGE_BYTES
    os.truncate(folder / "cut" / "segment-00000.kv", cut_at)


def test_outputs_over_a_disk_tiers_folder(
    tmp_path: Path, transcript: MakeTranscript, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_backend, "TICK_S", 0.01)
    folder = tmp_path / "kv"
    keys_in(tmp_path / "public", 0o644)
    asyncio.run(fill_disks(tmp_path, keys_in(tmp_path / "keys")))
    engine = Engine(folder)

    def damage() -> None:
        """Of the first block of the file that has any, a bit."""
        with (folder / "segment-00000.kv").open("r+b") as file:
            at = file.read().index((3).to_bytes(8, "big") * 8)
            file.seek(at)
            file.write(b"\xff")

    try:
        transcript({"PLACE": str(tmp_path)}).play(
            "disk",
            an_engine_begins=engine.begin,
            it_stores_5_blocks=engine.store,
            it_loads_2_blocks=engine.load,
            blocks_that_it_lost=engine.lost,
            it_ends=engine.end,
            damage_a_block=damage,
            remove_the_superblock=(folder / "superblock").unlink,
            what_is_left=lambda: sorted(file.name for file in folder.iterdir()),
            the_report=(tmp_path / "report.json").read_text,
        )
    finally:
        engine.end()


# --- fs ---


async def fill_folders(folder: Path) -> None:
    """Fill ``kv`` with two namespaces, ``used`` with one; others with protected ones and vLLM's."""
    rope = replace(_fs.CONTEXT, namespace=ROPE)
    for name, context, blocks in (
        ("kv", _fs.CONTEXT, 20),
        ("kv", rope, 7),
        ("used", _fs.CONTEXT, 20),
    ):
        async with _fs.open_fs(folder / name, context) as fs:
            for number in range(blocks):
                await fs.store(number)
                os.utime(fs.path(number), (1e9 + 100 * number, 1e9 + 100 * number))
    for name in ("auth_key_env", "encryption_key_env"):
        async with _fs.open_fs(folder / name, **{name: "TEST_KEYS"}) as fs:
            for number in range(3):
                await fs.store(number)
    async with _fs.open_fs(folder / "vllm", layout="vllm") as fs:
        await fs.store(9)
        for number in range(1, 10):
            if number < 9:  # vLLM's: it writes no checksum
                fs.path(number).parent.mkdir(parents=True, exist_ok=True)
                fs.path(number).write_bytes(bytes(_fs.BLOCK_BYTES))
            os.utime(fs.path(number), (1e9 + 100 * number, 1e9 + 100 * number))


class FsBlocks:
    """The blocks of ``fs`` folders, and what befalls them."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder = folder
        self._monkeypatch = monkeypatch
        self._real = time.time

    def _at(self, number: int, name: str = "kv") -> Path:
        return min((self._folder / name).rglob(f"{_fs.key_of(number).hex()}.kv"))

    def damage(self) -> None:
        path = self._at(3)
        path.write_bytes(path.read_bytes()[:77] + b"\xff" + path.read_bytes()[78:])

    def tear(self) -> None:
        os.truncate(self._at(3), 100)

    def damage_protected(self) -> None:
        for name in ("auth_key_env", "encryption_key_env"):
            path = self._at(1, name)
            path.write_bytes(path.read_bytes()[:-8] + b"\xff" * 8)

    def add_other_weights(self) -> None:
        """Of weights without a name, and of weights that have one and so may come again."""
        alive = self._at(1)
        for key in (dead_key(_fs.key_of(1)), *marked((_fs.key_of(1),), mark_of_name("step 1"))):
            alive.with_name(f"{key.hex()}.kv").write_bytes(alive.read_bytes())
            os.utime(alive.with_name(f"{key.hex()}.kv"), (1e9, 1e9))

    def age(self) -> None:
        for number, age_h in ((18, 25), (19, 23)):
            stored_s = self._real() - 3600 * age_h
            os.utime(self._at(number, "used"), (stored_s, stored_s))

    def set_clock(self, ahead_h: int) -> None:
        self._monkeypatch.setattr(time, "time", lambda: self._real() + 3600 * ahead_h)

    def leave_unfinished(self) -> None:
        (min(self._folder.glob("used/*/???")) / "unfinished.tmp").write_bytes(bytes(10_000))

    def numbers(self) -> list[int]:
        there = {path.name for path in (self._folder / "used").rglob("*.kv")}
        return [number for number in range(20) if f"{_fs.key_of(number).hex()}.kv" in there]


def test_outputs_over_an_fs_tiers_folder(
    tmp_path: Path, transcript: MakeTranscript, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This host's clock may be hours off: blocks are the server's, or other hosts'."""
    monkeypatch.setenv("TEST_KEYS", KEYS)
    asyncio.run(fill_folders(tmp_path))
    blocks = FsBlocks(tmp_path, monkeypatch)
    transcript({"PLACE": str(tmp_path)}).play(
        "fs",
        damage_a_block=blocks.damage,
        tear_it=blocks.tear,
        damage_protected_blocks=blocks.damage_protected,
        add_blocks_of_other_weights=blocks.add_other_weights,
        two_blocks_were_stored_25_and_23_hours_ago=blocks.age,
        the_clock_is_6_hours_ahead=lambda: blocks.set_clock(6),
        the_clock_is_6_hours_behind=lambda: blocks.set_clock(-6),
        leave_an_unfinished_block=blocks.leave_unfinished,
        what_is_left=blocks.numbers,
    )


# --- servers ---


class LaterClock:
    """Of ``purge`` alone: what was stored just now is eight days old."""

    time = staticmethod(lambda: time.time() + 8 * DAY_S)


def test_outputs_over_redis_servers(
    tmp_path: Path, transcript: MakeTranscript, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A list lies where a block may be, and names that are nearly a block's beside them."""
    password = "open sesame"
    monkeypatch.setenv("TEST_REDIS_PASSWORD", password)
    monkeypatch.setattr(redis_offline, "NAMES_AT_ONCE", 3)
    contexts = (_redis.CONTEXT, replace(_redis.CONTEXT, namespace=FP8))
    own, other = map(namespace_name, contexts)
    theirs = ("kvtier:theirs", "kvtier:a:b:00", "kvtier:m_1:no hex", "other:m_1:00", "kvtier::00")

    async def use(work: Callable[[_redis.Tier], Any], context: Any = contexts[0]) -> Any:
        async with _redis.open_redis(
            server.url, context, password_env="TEST_REDIS_PASSWORD"
        ) as tier:
            await tier.until(Connection.UP)
            return await work(tier)

    with running("valkey", tmp_path / "server", "--requirepass", password) as server:
        for context, blocks in zip(contexts, (7, 3), strict=True):
            asyncio.run(use(lambda tier, blocks=blocks: tier.store(*range(blocks)), context))
        ask = partial(server.ask, password=password)
        for name in theirs:
            ask("SET", name, "x")
        ask("RPUSH", f"kvtier:{other}:ff", "a list")
        dead = f"kvtier:{own}:{dead_key().hex()}"
        entry = {"type": "redis", "url": server.url, "password_env": "TEST_REDIS_PASSWORD"}
        transcript({"ENTRY": json.dumps(entry), "URL": server.url}).play(
            "redis",
            add_a_block_of_weights_without_a_name=lambda: ask("SET", dead, "x") and None,
            an_engine_loads_a_block=lambda: asyncio.run(use(lambda tier: tier.load(0)))[0].name,
            what_is_left=lambda: sorted(ask("KEYS", "*")),
        )


def test_outputs_over_a_bucket(transcript: MakeTranscript, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is none of a tier's lies beside its blocks, and listings come in several pages."""
    set_credentials()
    monkeypatch.setattr(s3_client, "LISTED_AT_ONCE", 3)
    contexts = (_s3.CONTEXT, replace(_s3.CONTEXT, namespace=FP8))
    own, _ = map(namespace_name, contexts)
    theirs = (
        *("p/readme", "p/my_model/description.json", f"pp/{own}/abc/abc0"),
        *(f"p/{own}/abc/{name}" for name in ("no hex", "abd0", "abc0/more")),
    )

    async def use(work: Callable[[_s3.S3], Any], context: Any = contexts[0]) -> Any:
        async with _s3.open_s3(server.endpoint, "p", context) as tier:
            return await work(tier)

    with moto_server() as server:
        for context, blocks in zip(contexts, (7, 3), strict=True):
            asyncio.run(use(lambda tier, blocks=blocks: tier.store(*range(blocks)), context))
        client, key = client_for(server.endpoint), dead_key().hex()
        for name in theirs:
            client.put_object(Bucket=BUCKET, Key=name, Body=b"x")

        def add_dead() -> None:
            client.put_object(Bucket=BUCKET, Key=f"p/{own}/{key[:3]}/{key}", Body=b"x")

        def names() -> str:
            found = client.list_objects_v2(Bucket=BUCKET)["Contents"]
            return "\n".join(sorted(each["Key"] for each in found))

        entry = {"type": "s3", **options_for(server.endpoint, "p")}
        elsewhere = {**entry, "url": "s3://no-such-bucket/p"}
        names_of = {"ENTRY": json.dumps(entry), "ELSEWHERE": json.dumps(elsewhere)}
        transcript(names_of | {"URL": server.endpoint}).play(
            "s3",
            add_a_block_of_weights_without_a_name=add_dead,
            eight_days_pass=lambda: monkeypatch.setattr(purge, "time", LaterClock),
            an_engine_loads_a_block=lambda: asyncio.run(use(lambda tier: tier.load(0)))[0].name,
            what_is_left=names,
        )


# --- what needs no storage ---


def test_outputs_of_what_is_refused(
    tmp_path: Path, transcript: MakeTranscript, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing is made, not even by what is refused late."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("no folder")
    trace_lines(tmp_path / "trace.jsonl", [1, 2, 3, 4], [5, 6])
    (tmp_path / "bad.jsonl").write_text((tmp_path / "trace.jsonl").read_text() + "nonsense\n")
    (tmp_path / "report.json").write_text('{"report": "kvtier replay --policies"}')
    before = sorted(tmp_path.rglob("*"))
    transcript({"PLACE": str(tmp_path)}).play("refused")
    assert sorted(tmp_path.rglob("*")) == before


def trace_lines(path: Path, *requests: list[int]) -> None:
    lines = (
        {"timestamp": t, "input_length": 512 * len(ids), "output_length": 1, "hash_ids": ids}
        for t, ids in enumerate(requests)
    )
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "torch_dtype": "bfloat16",
}


def test_outputs_of_size_and_replay(tmp_path: Path, transcript: MakeTranscript) -> None:
    """``talks``: two conversations that take turns, and a crowd that never comes back."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    trace_lines(tmp_path / "trace.jsonl", [1, 2, 3, 4], [5, 6, 7, 8], [1, 2, 3, 4], [1, 2, 9, 10])
    turns = [
        [*([100 * talk + block for block in range(turn)] for talk in (0, 1))]
        + [[1000 + 10 * turn + other] for other in range(5)]
        for turn in range(1, 9)
    ]
    trace_lines(tmp_path / "talks.jsonl", *(request for turn in turns for request in turn))
    with (tmp_path / "talks.jsonl").open("a") as file:
        file.write("nonsense\n")
    transcript({"PLACE": str(tmp_path)}).play(
        "others", the_report=(tmp_path / "report.json").read_text
    )


PARTS = {
    "KVTIER": (
        '"spec_name": "KVTierOffloadingSpec", "spec_module_path": "kvtier.vllm", '
        '"cpu_bytes_to_use": "16MiB"'
    ),
    "VLLM": '"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 16777216',
    "CONNECTOR": '"kv_connector": "OffloadingConnector", "kv_role": "kv_both"',
    "MULTI": '"kv_connector": "MultiConnector", "kv_role": "kv_both"',
    "HOSTED": '"type": "KVTierSecondaryTier", "module_path": "kvtier.vllm"',
    "DISK": '"type": "disk", "path": "PLACE/kv", "capacity_bytes": "1GiB"',
    "FS": '"type": "fs", "root_dir": "PLACE/kv"',
    "REDIS": '"type": "redis", "url": "redis://kv1:6379"',
    "S3": '"type": "s3", "url": "s3://bucket/kv"',
    "MOONCAKE": '"type": "mooncake", "master": "kv1:50051"',
    "MEMORY": '"type": "memory", "capacity_bytes": "1MiB"',
}
"""Of configurations. A key that is given again behind them takes the place of theirs."""


def test_outputs_of_check(
    tmp_path: Path, transcript: MakeTranscript, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each mistake that people make in a configuration is named with its remedy."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(places, "ROOT", str(tmp_path.parent))  # the folder may be mounted itself
    monkeypatch.delenv("KVTIER_UNSET", raising=False)
    for name in ("model", "weightless", "same", "public"):
        (tmp_path / name).mkdir()
    for name in ("model", "weightless"):
        (tmp_path / name / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "model" / "below").mkdir()
    (tmp_path / "model" / "below" / "model.gguf").touch()
    (tmp_path / "public").chmod(0o777)
    (tmp_path / "link").symlink_to(tmp_path / "same")
    (tmp_path / "file").touch()
    keys_in(tmp_path / "keys")
    keys_in(tmp_path / "keys-for-all", 0o644)
    transcript({"PLACE": str(tmp_path)}, PARTS).play("check")
