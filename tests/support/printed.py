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
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

from tests.support.patience import PATIENCE_S
from tests.support.server_program import ServerProgram

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

ROOT: Final = Path(__file__).parents[2]
DOCS: Final = ROOT / "docs"

_BLOCK: Final = re.compile(r"^( *)```(\w+)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
_COMMENT: Final = re.compile(r" +# .*$")
_CHANGING: Final = (
    (re.compile(r"(?<![0-9a-f])[0-9a-f]{12,}(?:…[0-9a-f]+)?(?![0-9a-f])"), "#"),
    (re.compile(r"(?<![\w/])\d[\d.,]*(?: ?(?:[kKMGT]i?B?|m?s|min|h|d)\b|%)?"), "#"),
    (re.compile(r"(?<!\S)-(?!\S)"), "#"),
    (re.compile(r"──+"), "──"),
)

PLACES: Final = ("/nvme", "/mnt", "/etc", "/models", "/var")
"""Folders of any page's machine. Where a page is followed, they are below the test's folder."""

SPEC: Final = {"spec_name": "KVTierOffloadingSpec", "spec_module_path": "kvtier.vllm"}


class Command(NamedTuple):
    """A command for a shell, in one line but for what is in quotes, and what is shown below it."""

    line: str
    shown: str


def blocks_in(text: str) -> list[tuple[str, str]]:
    """Return a text's fenced blocks: the language of each, and what stands in it."""
    found = _BLOCK.findall(text)
    return [(language, textwrap.dedent(indent + block)) for indent, language, block in found]


def prose_of(text: str) -> str:
    """Return a text without its fenced blocks."""
    return _BLOCK.sub("", text)


def printed(page: str, *languages: str) -> list[str]:
    """Return the blocks of these languages on a page; ``page``: its path below ``docs``."""
    blocks = blocks_in((DOCS / page).read_text())
    return [block for language, block in blocks if language in languages]


def commands_in(text: str) -> Iterator[Command]:
    """Yield a text's commands: lines ``$ ...`` of blocks, and all that ``bash`` blocks have."""
    for language, block in blocks_in(text):
        found: list[tuple[list[str], list[str]]] = []
        for line in block.splitlines() if language in {"bash", "console", "text"} else ():
            words = line.strip()
            if found and not found[-1][1] and _goes_on("\n".join(found[-1][0])):
                found[-1][0].append(line)
            elif language == "bash" or words.startswith("$ "):
                found.append(([words.removeprefix("$ ")], []))
            elif found:
                found[-1][1].append(line)
        for lines, shown in found:
            yield Command("\n".join(lines).replace("\\\n", " "), "\n".join(shown))


def commands(page: str, word: str = "") -> list[str]:
    """Return the commands of a page without comments; those with ``word`` in them."""
    found = (_COMMENT.sub("", each.line) for each in commands_in((DOCS / page).read_text()))
    return [each for each in found if word in each]


def options_of(page: str, module: str) -> list[list[str]]:
    """Return what follows ``python -m module`` in each command and inline code of a page."""
    inline = re.findall(r"`([^`\n]+)`", prose_of((DOCS / page).read_text()))
    pattern = re.compile(rf"python3? -m {re.escape(module)}(?: |$)(.*)")
    found = (pattern.search(each) for each in [*commands(page), *inline])
    return [shlex.split(match[1]) for match in found if match]


def outputs(page: str, word: str) -> list[str]:
    """Return what a page shows below each of its commands that have ``word`` in them."""
    return [each.shown for each in commands_in((DOCS / page).read_text()) if word in each.line]


def configurations(page: str) -> list[dict[str, Any]]:
    """Return the extra configurations in a page's JSON, all with little memory.

    It may print one, a part of one, or an entry of ``secondary_tiers``.
    """
    found = []
    for block in printed(page, "json"):
        whole = block if block.startswith("{") else f"{{{block}}}"
        given = json.loads(whole.replace(", ...", ""))
        given = given.get("kv_connector_extra_config", given)
        if "type" in given:
            given = {"secondary_tiers": [given]}
        of_vllm = {"spec_name": "TieringOffloadingSpec"}
        spec = of_vllm if "KVTierSecondaryTier" in block else SPEC
        found.append({**spec, **given, "cpu_bytes_to_use": "1MiB"})
    return found


def entries(page: str) -> list[dict[str, Any]]:
    """Return the entries of ``secondary_tiers`` that a page shows as JSON."""
    return [tier for each in configurations(page) for tier in each.get("secondary_tiers", [])]


def shape_of(output: str) -> list[str]:
    """Return an output's lines without figures and widths of columns, each kind of line once."""
    for pattern, instead in _CHANGING:
        output = pattern.sub(instead, output)
    return [*dict.fromkeys(" ".join(each.split()) for each in output.splitlines() if each.strip())]


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
        for old in self._instead:
            self._used[old] += text.count(old)
        words = "|".join(map(re.escape, self._instead))
        return re.sub(words, lambda match: self._instead[match[0]], text) if words else text

    def run(self, command: str, *, status: int = 0) -> str:
        """Run one; return what it printed. ``export`` holds for those that follow."""
        if command.startswith("export "):
            words = shlex.split(self.here(command))[1:]
            self.environment.update(word.split("=", 1) for word in words)
            return ""
        ended = subprocess.run(
            ["bash", "-c", self.here(command)],
            cwd=self.folder,
            env={**os.environ, **self._environment()},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert ended.returncode == status, f"{command}\n{ended.stdout}"
        return ended.stdout

    def program(self, command: str, port: int) -> ServerProgram:
        """Return the server that a command starts."""
        return ServerProgram(
            ["bash", "-c", f"exec {self.here(command)}"],
            self.folder / f"{port}.log",
            port,
            self._environment(),
        )

    def configuration(self, *tiers: Mapping[str, Any], **others: Any) -> None:
        """Write the file that ``kvtier check`` reads, with entries of the page."""
        config = {**SPEC, "cpu_bytes_to_use": "64MB", "secondary_tiers": tiers, **others}
        (self.folder / "kv.json").write_text(self.here(json.dumps(config)))

    def check_all_is_used(self) -> None:
        """Fail if the table names something that is not on the page any more."""
        assert [old for old in self._instead if not self._used[old]] == []

    def _environment(self) -> dict[str, str]:
        python = os.pathsep.join([str(ROOT), str(ROOT / "backends"), *filter(None, sys.path)])
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        return {"PATH": path, "PYTHONPATH": python, "COLUMNS": "200", **self.environment}


class Walk(Reader):
    """Follows a page from its first command to the last: none of them may be left."""

    def __init__(self, page: str, folder: Path, instead: Mapping[str, str] | None = None) -> None:
        """``instead``: besides ``PLACES``."""
        super().__init__(folder, {each: f"{folder}{each}" for each in PLACES} | (instead or {}))
        self._left = [*commands_in((DOCS / page).read_text())]
        for place in PLACES:
            (folder / place[1:]).mkdir(exist_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        assert kind or not self._left, f"commands that no test runs: {self._left}"

    def take(self) -> str:
        """Return the next command, which the test runs by other means, or has a reason."""
        return self._left.pop(0).line

    def step(self, *, status: int = 0, alike: Callable[[str], list[str]] = shape_of) -> str:
        """Run the next command; return what it printed, with the page's words for places.

        If the page shows an output, it must be like this one, which ``alike`` makes equal.
        """
        line, shown = self._left.pop(0)
        said = self.run(line, status=status)
        for words, here in self._instead.items():
            said = said.replace(here, words)
        if shown:
            ours, theirs = alike(said), alike(shown)
            assert ours == theirs, f"{said}\nbesides figures: {set(ours) ^ set(theirs)}"
        return said


def _goes_on(line: str) -> bool:
    if line.endswith("\\"):
        return True
    try:
        shlex.split(line, comments=True)
    except ValueError:  # within quotes
        return True
    return False
