"""The pages of the docs, and parts of them."""

from __future__ import annotations

import re

from sources import ROOT

DOCS = ROOT / "docs"


def section(page: str, title: str) -> str:
    """Return what stands below a heading of the second level, up to the next one."""
    text = page.partition(f"\n## {title}\n")[2]
    assert text, f"no heading {title}"
    return text.partition("\n## ")[0]


def in_code_type(text: str) -> list[str]:
    """Return what a text has in code type."""
    return re.findall(r"`([^`]+)`", text)
