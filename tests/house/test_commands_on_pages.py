"""Every ``kvtier`` command that a page shows is one that the command line takes.

Here each is only read: a subcommand, an option or a value that is no more would stop a reader. The
tests that run what a page prints name it; see ``tests/support/printed.py``.
"""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING

import pytest
from cyclopts import CycloptsError, MissingArgumentError
from pages import DOCS
from sources import ROOT
from test_docs import PAGES

from kvtier.tools.cli.main import make_app
from tests.support.printed import blocks_in, commands_in, prose_of

if TYPE_CHECKING:
    from collections.abc import Iterator

OF_KVTIER = re.compile(r"(?:.*(?:&& | -- ))?kvtier (.*)", re.DOTALL)
INLINE = re.compile(r"`kvtier ([a-z][^`…]*)`")
NO_COMMANDS = {"is", "fs", "disk", "disk,", "bench:"}  # lines of the log, and names in tables
ENDS = {"|", ">", "&", "&&", ";"}  # of a command, for a shell


def in_blocks(text: str) -> Iterator[list[str]]:
    """Yield the words behind ``kvtier`` of each command in a page's blocks."""
    for command in commands_in(text):
        if match := OF_KVTIER.fullmatch(command.line):
            words = shlex.split(match[1], comments=True)
            end = next((n for n, word in enumerate(words) if word in ENDS), len(words))
            yield words[:end]


def in_text(text: str) -> Iterator[list[str]]:
    """Yield the words behind ``kvtier`` of what stands in code type: often a part of a command."""
    for match in INLINE.finditer(prose_of(text)):
        words = shlex.split(match[1].replace("\n", " "))
        if words[0] not in NO_COMMANDS:
            yield words


def refusal(words: list[str], *, is_part: bool) -> str | None:
    """Return why a command is not taken; ``is_part``: what it lacks is no reason.

    It is read as the command line reads it, and not run.
    """
    try:
        make_app().parse_args(words, print_error=False, exit_on_error=False)
    except CycloptsError as refused:
        return None if is_part and isinstance(refused, MissingArgumentError) else str(refused)
    return None


@pytest.mark.parametrize("is_part", [False, True], ids=["in blocks", "in the text"])
def test_every_command_of_a_page_is_taken(*, is_part: bool) -> None:
    found = [
        (page.name, words)
        for page in PAGES
        for words in (in_text if is_part else in_blocks)(page.read_text())
    ]
    assert len(found) > 30
    refused = [
        (page, " ".join(words), why)
        for page, words in found
        if (why := refusal(words, is_part=is_part))
    ]
    assert not refused


def test_a_command_that_is_not_taken_is_found() -> None:
    """Otherwise the check above would prove nothing."""
    page = "```console\n$ kvtier ls /kv  # all of it\n$ kvtier purge --olden 7d /kv | less\n```\n"
    good, bad = in_blocks(page)
    assert (good, bad) == (["ls", "/kv"], ["purge", "--olden", "7d", "/kv"])
    assert refusal(good, is_part=False) is None
    assert refusal(bad, is_part=False)
    (part,) = in_text("Run `kvtier purge --older-than 7d` later, and ```text\nkvtier ls\n``` not.")
    assert refusal(part, is_part=True) is None
    assert refusal(part, is_part=False)


NOT_FOLLOWED = {
    "run-on-kubernetes": "python -m stress.pods runs its manifests",
    "share-a-folder": "needs a folder that engines fill",
}
"""Pages whose commands and configurations no test takes from the page, and why."""


def test_every_how_to_is_followed_by_a_test() -> None:
    """What it has a reader run or configure is run, or checked, as it is printed."""
    pages = {
        page.stem
        for page in DOCS.glob("how-to/*.md")
        if any(commands_in(text := page.read_text())) or "secondary_tiers" in _json_of(text)
    }
    files = {*ROOT.glob("tests/*/**/test_*.py")} - {*ROOT.glob("tests/house/*.py")}
    texts = [path.read_text() for path in sorted(files)]
    tests = "".join(text for text in texts if "tests.support.printed import" in text)
    followed = {page for page in pages if re.search(rf'"(how-to/{page}\.md|{page})"', tests)}
    assert pages - followed == NOT_FOLLOWED.keys()


def _json_of(text: str) -> str:
    return "".join(block for language, block in blocks_in(text) if language == "json")
