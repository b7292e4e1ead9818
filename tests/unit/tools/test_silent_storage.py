"""Commands over a folder whose storage hangs end, and name it. The filesystem is real.

A thread of theirs in such a call would keep them from ending, even when they are killed.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from kvtier.tools import answering
from kvtier.tools.answering import answers
from kvtier.tools.cli.exit_status import BAD_INPUT
from kvtier.tools.cli.main import main
from tests.support.fuse_folder import FuseFolder, fuse_folder
from tests.support.needs import needs
from tests.support.patience import PATIENCE_S
from tests.unit.backends.disk._disk import open_disk

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [needs("fuse"), pytest.mark.slow]

ANSWER_S = 0.01
"""So long a command waits for storage, once the test has seen that it hangs: it never answers."""

PROGRAM = f"""
import subprocess, sys
from kvtier.tools import answering
from kvtier.tools.cli.main import main

def wait(process, timeout=None, wait=subprocess.Popen.wait):
    if timeout == {ANSWER_S}:
        sys.stdin.readline()
    return wait(process, timeout)

subprocess.Popen.wait = wait
answering.ANSWER_S_MAX, answering._KILL_S = {ANSWER_S}, {ANSWER_S / 2}
if sys.argv[1] == "doctor":
    from kvtier.tools.doctor import examination
    examination.WAIT_S = {ANSWER_S}
sys.exit(main(sys.argv[1:]))
"""

HANGS = [("*",), ("open",), ("read",), ("getattr",), ("readdir", "opendir")]


def every_hang_of(tried: str, others: tuple[str, ...]) -> list[Any]:
    """Return each hang under one command, or kind of tier, and one hang under the others.

    They ask whether a folder answers at one place, so their other hangs show nothing new: ``long``.
    """
    return [
        pytest.param(
            each,
            hangs,
            marks=[pytest.mark.long] if each != tried and hangs != HANGS[0] else [],
            id="-".join((each, *hangs)),
        )
        for each in (tried, *others)
        for hangs in HANGS
    ]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[FuseFolder]:
    """Return a folder with a disk tier's in it, ``kv``."""

    async def fill(path: Path) -> None:
        async with open_disk(path) as disk:
            await disk.store(1)
            await disk.come_to_rest()

    with fuse_folder(tmp_path) as mounted:
        asyncio.run(fill(mounted.source / "kv"))
        yield mounted


def run_over(folder: FuseFolder, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a command that gives up as soon as its look at the folder hangs, and not before."""
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        folder.wait_until_something_hangs()
        stdout, stderr = process.communicate("it hangs\n", timeout=PATIENCE_S)
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


@pytest.mark.parametrize(("command", "hangs"), every_hang_of("ls", ("fsck", "purge")))
def test_a_command_on_a_folder_ends_and_names_it(
    folder: FuseFolder, command: str, hangs: tuple[str, ...]
) -> None:
    folder.hang(*hangs)
    path = str(folder.path / "kv")
    ended = run_over(folder, command, path, *(["--all"] if command == "purge" else []))
    assert ended.returncode == BAD_INPUT
    assert f"kvtier {command}: {path} has not answered for {ANSWER_S:g} s" in ended.stderr
    assert "Mend the storage" in ended.stderr
    assert folder.waiting, "it ended before the call did"


@pytest.mark.parametrize(("kind", "hangs"), every_hang_of("disk", ("fs",)))
def test_a_check_of_a_configuration_ends_and_names_the_tier_and_the_folder(
    folder: FuseFolder, kind: str, hangs: tuple[str, ...], tmp_path: Path
) -> None:
    path = str(folder.path / "kv")
    key = {"disk": "path", "fs": "root_dir"}[kind]
    tier = {"type": kind, key: path, **({"capacity_bytes": "16MiB"} if kind == "disk" else {})}
    config = {
        "spec_name": "KVTierOffloadingSpec",
        "spec_module_path": "kvtier.vllm",
        "cpu_bytes_to_use": "1MiB",
        "secondary_tiers": [tier, {"type": "memory", "capacity_bytes": "1MiB"}],
    }
    (tmp_path / "kv.json").write_text(json.dumps(config))
    folder.hang(*hangs)
    ended = run_over(folder, "check", str(tmp_path / "kv.json"), "--json", "-")
    found = json.loads(ended.stdout)
    assert ended.returncode == 1
    (text,) = found["refused"]
    for part in (f"1:{kind}", f"{key}={path!r}", f"has not answered for {ANSWER_S:g} s", "Mend"):
        assert part in text
    assert len(found["tiers"]) == 1, "the others are looked at all the same"
    assert folder.waiting


def test_the_doctor_ends_and_names_the_tier_and_the_folder(
    folder: FuseFolder, tmp_path: Path
) -> None:
    path = str(folder.path / "kv")
    config = {
        "spec_name": "KVTierOffloadingSpec",
        "spec_module_path": "kvtier.vllm",
        "cpu_bytes_to_use": "1MiB",
        "secondary_tiers": [{"type": "disk", "path": path, "capacity_bytes": "16MiB"}],
    }
    (tmp_path / "kv.json").write_text(json.dumps(config))
    folder.hang("*")
    ended = run_over(folder, "doctor", str(tmp_path / "kv.json"), "--json", "-")
    (found,) = json.loads(ended.stdout)["findings"]
    assert (ended.returncode, found["severity"]) == (1, "error")
    for part in ("1:disk", f"path={path!r}", f"has not answered for {ANSWER_S:g} s"):
        assert part in found["what"]
    assert folder.waiting, "it ended before the call did"


def test_a_check_of_a_model_whose_storage_hangs_ends_and_says_so(
    folder: FuseFolder, tmp_path: Path
) -> None:
    config = {
        "spec_name": "KVTierOffloadingSpec",
        "spec_module_path": "kvtier.vllm",
        "cpu_bytes_to_use": "1MiB",
        "secondary_tiers": [{"type": "redis", "url": "redis://127.0.0.1:6379"}],
    }
    (tmp_path / "kv.json").write_text(json.dumps(config))
    folder.hang("*")
    model = str(folder.path / "model")
    ended = run_over(folder, "check", str(tmp_path / "kv.json"), "--json", "-", "--model", model)
    found = json.loads(ended.stdout)
    assert (ended.returncode, found["refused"], found["warned"]) == (0, [], [])
    assert f"the storage of {model} does not answer" in found["not_checked"][-1]
    assert folder.waiting


def test_storage_that_answers_is_not_refused(
    folder: FuseFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by an error, or where there is nothing yet."""
    monkeypatch.setattr(answering, "ANSWER_S_MAX", PATIENCE_S)
    assert answers(str(folder.path / "kv"))
    assert answers(str(folder.path / "not/there/yet"))
    assert answers(str(tmp_path / "\ud800"))
    assert answers("a\0b")
    assert answers("/" + "x" * 5000)
    assert answers("/dev/null")
    folder.fail()
    assert answers(str(folder.path / "kv"))
    folder.heal()
    assert main(["ls", str(folder.path / "kv"), "--json", "-"]) == 0
