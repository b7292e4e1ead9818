"""The command as a whole: its versions, what it needs, and that it asks before everything goes."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import subprocess
import sys
from importlib import metadata
from typing import TYPE_CHECKING

import pytest

from kvtier.tools.cli import check
from kvtier.tools.cli.exit_status import BAD_INPUT, INTERRUPTED
from kvtier.tools.cli.main import main
from tests.unit.backends.disk._disk import open_disk

if TYPE_CHECKING:
    from pathlib import Path

BLOCKS = 12


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a disk tier's folder with blocks in it."""

    async def fill() -> None:
        async with open_disk(tmp_path / "kv") as disk:
            await disk.store(*range(BLOCKS))
            await disk.come_to_rest()

    asyncio.run(fill())
    return tmp_path / "kv"


def on_a_terminal(answer: str, *arguments: str) -> tuple[int, str]:
    """Run ``python -m kvtier`` on a terminal of its own; return its status and what it printed."""
    ours, theirs = pty.openpty()
    try:
        os.write(ours, answer.encode())
        run = subprocess.run(
            [sys.executable, "-m", "kvtier", *arguments],
            stdin=theirs,
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        os.close(ours)
        os.close(theirs)
    return run.returncode, run.stdout + run.stderr


def blocks_in(folder: Path, capsys: pytest.CaptureFixture[str]) -> int:
    capsys.readouterr()
    assert main(["ls", str(folder), "--json", "-"]) == 0
    listed = json.loads(capsys.readouterr().out)
    return sum(row["blocks"] for row in listed["namespaces"])


@pytest.mark.parametrize("answer", ["n\n", "\n", "\x04", "what?\n"])
def test_purge_of_all_asks_on_a_terminal_and_takes_only_yes(
    answer: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, text = on_a_terminal(answer, "purge", str(folder), "--all")
    assert status == 1
    for part in ("Remove everything", str(folder), f"{BLOCKS} blocks", "nothing was removed"):
        assert part in text
    assert blocks_in(folder, capsys) == BLOCKS


@pytest.mark.parametrize(("answer", "options"), [("y\n", ()), ("", ("--yes",))])
def test_purge_of_all_removes_when_it_may(
    answer: str, options: tuple[str, ...], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, text = on_a_terminal(answer, "purge", str(folder), "--all", *options)
    assert status == 0
    assert ("[y/N]" in text) is (not options)
    assert f"removed: {BLOCKS} blocks" in text
    assert blocks_in(folder, capsys) == 0


def test_purge_does_not_ask_in_a_script(folder: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "kvtier", "purge", str(folder), "--all"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "[y/N]" not in run.stderr


def test_the_version_names_kvtier_python_and_vllm(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    line = capsys.readouterr().out
    assert line.startswith(f"kvtier {metadata.version('kvtier')} (Python 3.")
    assert "vllm" in line.lower()


@pytest.mark.parametrize(
    ("given", "what"),
    [
        (["lss"], 'kvtier: Unknown command "lss"'),
        (["ls"], "kvtier ls: "),
        (["ls", "/kv", "--jsn", "-"], "kvtier ls: Unknown option: --jsn"),
        (["evict", "/kv"], "--capacity"),
        (["evict", "/kv", "--capacity", "1GB", "--every", "soon"], '"soon"'),
        (["evict", "/kv", "--capacity", "1GB", "--every", "1", "--once"], "--every excludes"),
        (["replay", "t", "--format", "moon"], 'Choose from: "auto"'),
        (["bench", "tier"], "kvtier bench tier: "),
        (["purge", "/kv", "--no-dead"], "--no-dead"),
        (["check", "any.json", "--block-size", "0"], "--block-size=0 must be at least 1"),
    ],
)
def test_a_command_line_that_cannot_be_read_is_refused_in_one_line(
    given: list[str], what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(given) == BAD_INPUT
    captured = capsys.readouterr()
    assert captured.out == ""
    assert what in captured.err
    assert len(captured.err.splitlines()) == 1


def test_ctrl_c_that_no_command_catches_is_told_and_is_no_success(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_path: str) -> dict[str, object]:
        raise KeyboardInterrupt

    monkeypatch.setattr(check, "read_config", interrupted)
    assert main(["check", "any.json"]) == INTERRUPTED
    assert capsys.readouterr().err == "kvtier check: interrupted\n"
