"""Pages and messages have the field's words, in place of some that only kvtier had."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING, Final

from sources import ROOT, SHIPPED, name_of, tree_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

INSTEAD: Final = {
    r"put(?:s|ting)? off": "deferred",
    "anew": "again, or restarted",
    "lets? go": "released",
    "lately": "recently",
    "for good": "permanently",
    "(?:no|some)body": "the engine, the request or the process that it is",
}
WORDS: Final = re.compile(rf"\b(?:{'|'.join(INSTEAD)})\b", re.IGNORECASE)


def messages(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the texts of a file and their lines, but for docstrings: these are for developers."""
    tree = tree_of(path)
    descriptions = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and id(node) not in descriptions:
            yield node.lineno, str(node.value)


def test_pages_have_the_fields_words() -> None:
    found = [
        f"{name_of(page)}: {match[0]}"
        for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
        for match in WORDS.finditer(page.read_text())
    ]
    assert not found, INSTEAD


def test_messages_have_the_fields_words() -> None:
    found = [
        f"{name_of(path)}:{line}: {match[0]}"
        for path in SHIPPED
        for line, text in messages(path)
        for match in WORDS.finditer(text)
    ]
    assert not found, INSTEAD
