"""A real bash completes commands, options, choices and files, at the tab key."""

from __future__ import annotations

import os
import pty
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.unit.tools._shell import Shell

PROMPT = b"ready> "
RUNS = "kvtier() { printf '<%s>' \"$@\"; echo; }\n"  # in place of the command: shows its words


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/trace.jsonl").touch()
    return tmp_path


@pytest.fixture
def typed(home: Path) -> Iterator[Callable[[str], str]]:
    """Return what a bash, which reads the user's .bashrc, prints when a line has been typed."""
    with (home / ".bashrc").open("a") as bashrc:
        bashrc.write(f"{RUNS}PS1='{PROMPT.decode()}'\n")
    ours, theirs = pty.openpty()
    environment = {"HOME": str(home), "TERM": "dumb", "PATH": os.defpath}
    bash = subprocess.Popen(
        ["bash", "--noprofile", "-i"],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        cwd=home,
        env=environment,
        start_new_session=True,
    )
    os.close(theirs)

    def until_prompt() -> str:
        read = b""
        while not read.endswith(PROMPT):
            read += os.read(ours, 1 << 12)
        return read.removesuffix(PROMPT).decode()

    def type_line(line: str) -> str:
        os.write(ours, f"{line}\n".encode())
        return until_prompt().splitlines()[-1]

    try:
        until_prompt()
        yield type_line
    finally:
        bash.kill()
        bash.wait()
        os.close(ours)


@pytest.fixture
def installed(home: Path, kvtier: Shell) -> Path:
    assert not (home / ".local").exists()
    said = kvtier.shown("--install-completion", "bash")
    return Path(said.partition(": written")[0])


@pytest.mark.usefixtures("installed")
def test_bash_completes_what_is_typed_once_it_is_installed(typed: Callable[[str], str]) -> None:
    for line, words in (
        ("kvtier st\t", "<status>"),
        ("kvtier bench t\t", "<bench><tier>"),
        ("kvtier ls fol\tx", "<ls><folder/x>"),
        ("kvtier replay folder/tr\t--verify he\t", "<replay><folder/trace.jsonl><--verify><head>"),
        ("kvtier fsck folder --rep\t", "<fsck><folder><--repair>"),
        ("kvtier size --tra\tfolder/t\t", "<size><--trace><folder/trace.jsonl>"),
    ):
        assert typed(line) == words


def test_a_second_install_changes_nothing_and_show_prints_the_same(
    installed: Path, home: Path, kvtier: Shell
) -> None:
    before = (home / ".bashrc").read_text()
    kvtier.shown("--install-completion", "bash")
    assert (home / ".bashrc").read_text() == before
    assert kvtier.shown("--show-completion", "bash").strip() == installed.read_text().strip()


def test_a_home_that_cannot_be_written_and_a_shell_that_is_not_known_are_refused(
    home: Path, kvtier: Shell
) -> None:
    (home / ".local").touch()
    assert "kvtier --show-completion bash" in kvtier.refused("--install-completion", "bash")
    assert 'Choose from: "bash", "zsh", "fish"' in kvtier.refused("--show-completion", "tcsh")
