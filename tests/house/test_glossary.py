"""The glossary has the words that kvtier's pages and metrics use, and no others."""

from __future__ import annotations

import re

from pages import DOCS

from kvtier.core import metrics

GLOSSARY = DOCS / "reference/glossary.md"
NEEDED = {
    *("backend", "block", "cascade", "cell", "chunk", "circuit breaker", "digest", "facade"),
    *("generation", "half-open", "hosted tier", "job", "key", "KV-cache group", "lease", "mailbox"),
    *("namespace", "peer", "pin", "primary tier", "probe", "promotion", "record", "region"),
    *("request-scoped tier", "reservation", "sealed", "secondary tier", "slot"),
}
"""Words that a reader meets in options, metrics and log lines, and can't guess."""


def defined() -> list[str]:
    """Return the words of the tables, in their order."""
    rows = re.findall(r"^\| ([^|]+?) \| [^|]+ \|$", GLOSSARY.read_text(), re.MULTILINE)
    return [word for word in rows if word not in {"word", "---"}]


def test_each_word_is_defined_once() -> None:
    words = defined()
    assert len(words) == len(set(words))
    assert set(words) >= NEEDED


def test_each_defined_word_is_used_elsewhere() -> None:
    """A word that is gone from the pages needs no definition."""
    texts = [path.read_text() for path in DOCS.rglob("*.md") if path != GLOSSARY]
    helps = {**metrics.primary_definitions(), **metrics.tier_definitions()}
    used = "\n".join([*texts, *map(str, helps.values())]).lower()
    unused = [
        word
        for word in defined()
        if not re.search(rf"\b{word.lower()}".replace(" ", r"[\s_-]"), used)
    ]
    assert not unused
