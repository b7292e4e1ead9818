"""Every ``kvtier`` command that a page shows is one that the command line takes.

What commands print is compared in ``tests/unit/tools/golden``; here each is only read: a
subcommand, an option or a value that is no more would stop a reader.
"""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING

import pytest
from cyclopts import CycloptsError, MissingArgumentError
from test_docs import PAGES

from kvtier.tools.cli.main import make_app

if TYPE_CHECKING:
    from collections.abc import Iterator

BLOCK = re.compile(r"^ *```(\w+)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
SHOWN = re.compile(r"^\s*(?:\$ )(?:.*(?:&& | -- ))?kvtier (.*)$")
TYPED = re.compile(r"^\s*(?:\$ )?(?:.*(?:&& | -- ))?kvtier (.*)$")
INLINE = re.compile(r"`kvtier ([a-z][^`…]*)`")
NO_COMMANDS = {"is", "fs", "disk", "disk,", "bench:"}  # lines of the log, and names in tables
ENDS = {"|", ">", "&", "&&", ";"}  # of a command, for a shell


def in_blocks(text: str) -> Iterator[list[str]]:
    """Yield the words behind ``kvtier`` of each command in a page's blocks."""
    for language, block in BLOCK.findall(text):
        pattern = {"console": SHOWN, "text": SHOWN, "bash": TYPED}.get(language)
        for line in block.replace("\\\n", " ").splitlines() if pattern else ():
            if match := pattern and pattern.match(line):
                words = shlex.split(match[1], comments=True)
                end = next((n for n, word in enumerate(words) if word in ENDS), len(words))
                yield words[:end]


def in_text(text: str) -> Iterator[list[str]]:
    """Yield the words behind ``kvtier`` of what stands in code type: often a part of a command."""
    prose = BLOCK.sub("", text)
    for match in INLINE.finditer(prose):
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
