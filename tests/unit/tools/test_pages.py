"""What the how-to pages have a reader run does what they show; places and sizes are the test's."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import stat
import tomllib
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from time import time
from typing import TYPE_CHECKING, Any

import pytest

from kvtier.plugin_api.backend import Namespace
from kvtier_backends.disk import backend as disk_backend
from tests.support.needs import lacking, needs
from tests.support.printed import DOCS, Reader, Walk, configurations, printed, shape_of
from tests.support.redis_servers import HOST, free_port, program_path, running
from tests.unit.backends.disk._disk import CONTEXT, open_disk
from tests.unit.tools._pages import EnginePage
from tests.unit.tools._read_page import ReadPage
from tests.unit.tools.test_report import asked, recorded

if TYPE_CHECKING:
    from tests.unit.tools._shell import Shell

pytestmark = pytest.mark.slow  # each command is a process

DAY_S = 86_400
DISK = {"type": "disk", "path": "/nvme/kvtier", "capacity_bytes": "16MiB"}
LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
}


def write(file: Path, what: object) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(what))


# --- storage ---


def test_a_configuration_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first has more memory than any host, and a mistyped key; the second streams weights."""
    name = "how-to/check-a-configuration.md"
    is_on_root = tmp_path.stat().st_dev == Path("/").stat().st_dev
    monkeypatch.setenv("PASSWORD", "x")
    with running("valkey", tmp_path / "server") as server:
        instead = {"kv1:6379": f"{HOST}:{server.port}", "64GiB": "64000GiB"}
        with Walk(name, tmp_path, instead) as page:
            (tmp_path / "nvme/lost+found").mkdir()
            (tmp_path / "mnt/kv").mkdir()
            fs = {"type": "fs", "root_dir": "/mnt/kv"}
            page.configuration(DISK | {"io_dept": 4}, fs, cpu_bytes_to_use="64GiB")
            page.step(status=1, alike=shape_of if is_on_root else without_mounts)
            page.configuration(DISK)
            page.step()
            server.ask("ACL", "SETUSER", "kvtier", "on", ">x", "~kvtier:*", "+@all", "-set")
            login = {"username": "kvtier", "password_env": "PASSWORD"}
            page.configuration({"type": "redis", "url": "redis://kv1:6379", **login})
            page.step(status=1)


def without_mounts(text: str) -> list[str]:
    return [line for line in shape_of(text) if "root filesystem" not in line]


def test_a_disk_folder_is_listed_verified_and_purged_while_an_engine_uses_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_backend, "TICK_S", 0.01)
    with Walk("how-to/look-into-a-disk-folder.md", tmp_path) as page:
        asyncio.run(walk_beside_an_engine(page, tmp_path / "nvme/kvtier"))


async def walk_beside_an_engine(page: Walk, folder: Path) -> None:
    """The folder has a model's blocks, and those of other weights of it, some of them old."""
    for number, ago_d, blocks in ((254, 30, 8), (255, 10, 8), (255, 0, 12)):
        weights = {"sample_digest": f"{1 << number:064x}"}
        facts = {"model_name": "org/model-8b", "worker": {"model": {"weights": weights}}}
        async with open_disk(folder, replace(CONTEXT, namespace=Namespace(facts))) as disk:
            disk.clock.now_s = time() - ago_d * DAY_S
            await disk.store(*range(blocks))
            await disk.come_to_rest()
            for status in () if ago_d else (0, 0, 2, 0):
                await asyncio.to_thread(page.step, status=status)


def test_a_key_protects_a_folder_of_a_group(tmp_path: Path) -> None:
    """An engine takes both: the check refuses what an engine would."""
    with Walk("how-to/protect-shared-storage.md", tmp_path, {"chgrp kv": "chgrp $(id -g)"}) as page:
        page.step()
        page.step()
        page.step()
        assert page.take() == "(umask 007; vllm serve ...)"
    assert stat.S_IMODE((tmp_path / "mnt/kv").stat().st_mode) == 0o2770
    page.configuration({"type": "fs", "root_dir": "/mnt/kv", "auth_key_file": "/etc/kvtier/keys"})
    assert "tier 1:fs at /mnt/kv: nothing to refuse" in page.run("kvtier check kv.json").replace(
        str(tmp_path), ""
    )


def test_a_tier_is_measured(tmp_path: Path) -> None:
    """With 8 MiB in blocks of 4 KiB, once: the rows are the page's, but for the client's own."""
    port, small = free_port(), "bench tier --bytes 8MiB --block-bytes 4KiB --rounds 1"
    name = "how-to/choose-a-tier.md"
    programs = {"valkey-server": program_path("valkey"), "6379": f"{port}", "bench tier": small}
    with Walk(name, tmp_path, programs) as page:
        assert page.take().startswith("pip install "), "tests/house/test_docs.py reads these"
        server = page.program(page.take().removesuffix("&"), port)
        server.start()
        try:
            said = page.step()
        finally:
            server.kill()
    rows = re.findall(r"^ 4 KiB (\w+: kvtier.*?)  ", said, re.MULTILINE)
    assert len(rows) == 6
    assert rows == re.findall(
        r"^ 64 KiB (\w+: kvtier.*?)  ", printed(name, "text")[0], re.MULTILINE
    )


@pytest.mark.parametrize(
    "name",
    [
        "how-to/change-weights.md",
        "how-to/only-the-disk-tier.md",
        "how-to/protect-shared-storage.md",
        "how-to/read-vllms-folder.md",
        "how-to/replay-a-trace.md",
        "how-to/switch-from-vllm-tiering.md",
    ],
)
def test_an_engine_would_take_what_a_page_configures(
    name: str, tmp_path: Path, kvtier: Shell
) -> None:
    page = Walk(name, tmp_path)
    (tmp_path / "var/log/kvtier").mkdir(parents=True)
    (tmp_path / "etc/kvtier").mkdir()
    (tmp_path / "etc/kvtier/keys").touch(mode=0o600)
    (tmp_path / "etc/kvtier/keys").write_text("11" * 32)
    for each in configurations(name):
        write(tmp_path / "kv.json", json.loads(page.here(json.dumps(each))))
        assert kvtier("check", tmp_path / "kv.json")["refused"] == []


# --- traces ---


def write_traces(folder: Path) -> None:
    """Write a trace as Mooncake's, 20 conversations that grow in turns; and an engine's records."""
    turns = sorted((who + 3 * turn, who, turn) for who in range(20) for turn in range(4))
    with gzip.open(folder / "conversation_trace.jsonl.gz", "wt") as file:
        for moment, who, turn in turns:
            blocks = [100 * who + block for block in range(2 * turn + 2)]
            line = {"timestamp": 1000 * moment, "input_length": 512 * len(blocks)}
            file.write(json.dumps({**line, "output_length": 4, "hash_ids": blocks}) + "\n")
    for name in ("requests-0.jsonl.zst.1", "requests-0.jsonl.zst"):
        recorded(folder / name, *(asked(10.0 * number) for number in range(5)))


def test_a_trace_and_a_record_are_replayed(tmp_path: Path) -> None:
    write_traces(tmp_path)
    tiers = [{"type": "fs", "root_dir": f"{tmp_path}/kv"}]
    write(tmp_path / "config.json", {"cpu_bytes_to_use": "16MiB", "secondary_tiers": tiers})
    with Walk("how-to/replay-a-trace.md", tmp_path) as page:
        assert "Figures: report.json" in page.step()
        assert not (tmp_path / "tier").exists(), "the folder that it made"
        page.step()
        assert re.search(r"wrong blocks +0\b", page.step())


def test_a_record_and_a_replay_are_drawn(tmp_path: Path) -> None:
    """The replay's report is the one that the page about replays has written."""
    write_traces(tmp_path)
    Walk("how-to/replay-a-trace.md", tmp_path).step()
    with Walk("how-to/draw-a-report.md", tmp_path) as page:
        page.step()
        record = ReadPage((tmp_path / "page.html").read_text())
        page.step()
        assert ReadPage((tmp_path / "page.html").read_text()).title != record.title


def test_tokens_fit_and_sizes_hit_as_shown(tmp_path: Path) -> None:
    """The first output has nothing of a trace: its figures are the page's."""
    write_traces(tmp_path)
    write(tmp_path / "Llama-3.1-8B/config.json", LLAMA)
    with Walk("how-to/size-your-tiers.md", tmp_path) as page:
        page.step(alike=str.split)
        page.step()


# --- running engines ---


def test_engines_are_looked_at(tmp_path: Path) -> None:
    """The table is the page's: its head, and the rows of tiers that have the same names."""
    name = "how-to/look-at-engines.md"
    with EnginePage("0").served() as one, EnginePage("0").served() as other:
        servers = {"gpu1:8000": one, "gpu2:8000": other}
        with Walk(name, tmp_path, servers) as page:
            said = page.step()
    assert all(f"http://{each}/metrics" in said for each in servers)
    assert {*shape_of(said)[2:6]} <= {*shape_of((DOCS / name).read_text())}


def test_an_engine_in_trouble_is_examined(tmp_path: Path) -> None:
    metrics = EnginePage("0")
    metrics.set("kvtier:tier_breaker_state", 1, "0", tier="nvme", work="loads")
    with (
        metrics.served() as server,
        Walk("how-to/troubleshoot.md", tmp_path, {"gpu1:8000": server}) as page,
    ):
        page.configuration({"type": "memory", "name": "nvme", "capacity_bytes": "1MiB"})
        assert "nvme is not in use" in page.step(status=1)
        assert "[tier-not-in-use]" in page.step(status=1)


def test_a_configuration_and_an_engine_are_examined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes are a thousandth of the page's, so that they are no finding on a small machine."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    write(tmp_path / "models/llama/config.json", LLAMA)
    with TemporaryDirectory(dir="/dev/shm") as memory, EnginePage("0").served() as server:
        instead = {"4GiB": "4MiB", "2MiB": "2KiB", "127.0.0.1:8000": server}
        instead["/dev/shm/kvtier"] = f"{memory}/kvtier"
        with Walk("how-to/run-the-doctor.md", tmp_path, instead) as page:
            page.configuration(DISK | {"path": "/dev/shm/kvtier"}, cpu_bytes_to_use="4GiB")
            page.step(status=3)
            page.step(status=3)


def test_metrics_are_watched(tmp_path: Path) -> None:
    with Walk("how-to/watch-metrics.md", tmp_path) as page:
        (tmp_path / "etc/prometheus").mkdir()
        page.step()
        page.step()
        if lacking("prometheus"):
            page.take()  # test_monitoring.py is left out there for the same reason, and says so
        else:
            assert "SUCCESS" in page.step()
    assert json.loads((tmp_path / "kvtier-dashboard.json").read_text())["panels"]


@needs("curl")
def test_an_engine_that_was_switched_shows_its_tiers(tmp_path: Path) -> None:
    """With two tiers there are the six lines that the page says."""
    name = "how-to/switch-from-vllm-tiering.md"
    with (
        EnginePage("0").served() as server,
        Walk(name, tmp_path, {"localhost:8000": server}) as page,
    ):
        assert page.take().startswith("vllm serve "), "tests/vllm/test_engines_on_pages.py reads it"
        lines = page.step().splitlines()
    assert [line.rpartition(" ")[2] for line in lines] == ["0.0"] * 6


# --- packages ---


@pytest.mark.parametrize("name", ["how-to/write-a-backend.md", "how-to/write-a-policy.md"])
def test_what_a_reader_writes_is_found_and_keeps_the_contract(name: str, tmp_path: Path) -> None:
    """In a package as it is once it is installed, with the page's test beside it."""
    source, test, *_ = printed(name, "python")
    project: dict[str, Any] = tomllib.loads(printed(name, "toml")[0])["project"]
    ((group, entries),) = project["entry-points"].items()
    ((key, place),) = entries.items()
    file = tmp_path / f"{place.partition(':')[0].replace('.', '/')}.py"
    about = tmp_path / "my_package-1.dist-info"
    for path, text in (
        (file, source),
        (tmp_path / "test_contract.py", test),
        (about / "METADATA", "Metadata-Version: 2.1\nName: my_package\nVersion: 1\n"),
        (about / "entry_points.txt", f"[{group}]\n{key} = {place}\n"),
    ):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    (used,) = re.findall(r"installed, `(.*?)`", (DOCS / name).read_text())
    reader = Reader(tmp_path, {})
    given = json.loads(used if used.startswith("{") else f"{{{used}}}")
    reader.configuration(*[given] * ("type" in given), **{} if "type" in given else given)
    reader.run("PYTHONPATH=.:$PYTHONPATH kvtier check kv.json")
    reader.run("PYTHONPATH=.:$PYTHONPATH pytest -q -p no:cacheprovider test_contract.py")
