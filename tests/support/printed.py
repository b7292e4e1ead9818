"""What pages of the docs have a reader run, as it is printed, and a shell that runs it.

A test gives one table of what stands there for a reader's own things, and what stands for it here:
an address, a folder, a size. All else is the page's.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tests.support.patience import PATIENCE_S
from tests.support.server_program import ServerProgram

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

ROOT: Final = Path(__file__).parents[2]
DOCS: Final = ROOT / "docs"

_BLOCK: Final = re.compile(r"^( *)```(\w+)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
_COMMENT: Final = re.compile(r" +# .*$")
_CHANGING: Final = (
    (re.compile(r"(?<![0-9a-f])[0-9a-f]{12}(?![0-9a-f])"), "DIGEST"),
    (re.compile(r"(?<!\w)[\d.,]+ (?:bytes|[KMG]iB|s|min|h|d)(?!\w)"), "AMOUNT"),
    (re.compile(r"(?<=\s)[\d,]+(?=\s)"), "COUNT"),
    (re.compile(r"─+"), "─"),
)


def printed(page: str, *languages: str) -> list[str]:
    """Return the blocks of these languages on a page; ``page``: its path below ``docs``."""
    return [
        textwrap.dedent(indent + text)
        for indent, language, text in _BLOCK.findall((DOCS / page).read_text())
        if language in languages
    ]


def commands(page: str, word: str = "") -> list[str]:
    """Return the commands of a page's blocks, each in one line; those with ``word`` in them."""
    found = [each for block in printed(page, "bash") for each in _statements(block)]
    for block in printed(page, "console"):
        lines = block.replace("\\\n", " ").splitlines()
        found += [_COMMENT.sub("", line[2:]) for line in lines if line.startswith("$ ")]
    return [each for each in found if word in each]


def options_of(page: str, module: str) -> list[list[str]]:
    """Return what follows ``python -m module`` in each command and inline code of a page."""
    inline = re.findall(r"`([^`\n]+)`", _BLOCK.sub("", (DOCS / page).read_text()))
    pattern = re.compile(rf"python3? -m {re.escape(module)}(?: |$)(.*)")
    found = (pattern.search(each) for each in [*commands(page), *inline])
    return [shlex.split(match[1]) for match in found if match]


def outputs(page: str, word: str) -> list[str]:
    """Return what a page shows below each of its commands that have ``word`` in them."""
    shown = []
    for block in printed(page, "console"):
        for command, output in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block, re.MULTILINE):
            if word in command:
                shown.append(output)
    return shown


def entries(page: str) -> list[dict[str, Any]]:
    """Return the entries of ``secondary_tiers`` that a page shows as JSON."""
    found: list[dict[str, Any]] = []
    for block in printed(page, "json"):
        text = block if block.startswith("{") else f"{{{block}}}"
        given = json.loads(text)
        found += given.get("secondary_tiers", [given] if "type" in given else [])
    return found


def shape_of(output: str) -> list[str]:
    """Return an output's lines without what differs from run to run: sizes, ages, digests."""
    for pattern, instead in _CHANGING:
        output = pattern.sub(instead, output)
    return [" ".join(line.split()) for line in output.splitlines() if line.strip()]


class Reader:
    """Runs commands of a page in an empty folder of its own."""

    def __init__(self, folder: Path, instead: Mapping[str, str]) -> None:
        """``instead``: what is run in place of what is printed. Each must be printed somewhere."""
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.environment: dict[str, str] = {}
        self._instead = instead
        self._used: Counter[str] = Counter()

    def here(self, text: str) -> str:
        """Return a text of the page as it is run here."""
        for old, new in self._instead.items():
            self._used[old] += text.count(old)
            text = text.replace(old, new)
        return text

    def run(self, command: str, *, status: int = 0) -> str:
        """Run one; return its standard output. ``export`` holds for those that follow."""
        if command.startswith("export "):
            words = shlex.split(self.here(command))[1:]
            self.environment.update(word.split("=", 1) for word in words)
            return ""
        ended = subprocess.run(
            ["bash", "-c", self.here(command)],
            cwd=self.folder,
            env={**os.environ, **self._environment()},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert ended.returncode == status, f"{command}\n{ended.stdout}{ended.stderr}"
        return ended.stdout

    def program(self, command: str, port: int) -> ServerProgram:
        """Return the server that a command starts."""
        return ServerProgram(
            ["bash", "-c", f"exec {self.here(command)}"],
            self.folder / f"{port}.log",
            port,
            self._environment(),
        )

    def configuration(self, *tiers: Mapping[str, Any], name: str = "kv.json") -> None:
        """Write the file that ``kvtier check`` reads, with entries of the page."""
        engine = {"spec_name": "KVTierOffloadingSpec", "spec_module_path": "kvtier.vllm"}
        text = json.dumps({**engine, "cpu_bytes_to_use": "64MB", "secondary_tiers": tiers})
        (self.folder / name).write_text(self.here(text))

    def check_all_is_used(self) -> None:
        """Fail if the table names something that is not on the page any more."""
        assert [old for old in self._instead if not self._used[old]] == []

    def _environment(self) -> dict[str, str]:
        python = os.pathsep.join([str(ROOT), str(ROOT / "backends"), *filter(None, sys.path)])
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        return {"PATH": path, "PYTHONPATH": python, **self.environment}


def _statements(block: str) -> Iterator[str]:
    """Yield the statements of a shell's text; what is in quotes may go on over several lines."""
    statement = ""
    for line in block.replace("\\\n", " ").splitlines():
        statement += line if statement else _COMMENT.sub("", line)
        try:
            words = shlex.split(statement)
        except ValueError:
            statement += "\n"  # a quote is open
            continue
        if words:
            yield statement
        statement = ""
