"""Lets long names break where a reader expects it: behind ``_``, ``/`` and the like.

An mkdocs hook. A short name never breaks (``style.css``). A long one may, but not
in the midst of a word: a browser that is left alone breaks anywhere.
"""

from __future__ import annotations

import re
from typing import Final

LONG: Final = 26
"""Characters. What is shorter fits a line or a column, on a phone too."""

LONGEST: Final = 44
"""Characters. What is shorter fits a first column on a wide screen."""

_BLOCK: Final = re.compile(r"(<pre\b.*?</pre>)", re.DOTALL)
_CODE: Final = re.compile(r"<code>([^<]*)</code>")  # not with links in it: their addresses stay
_JOINT: Final = re.compile(r"(?<=[\w}\]])([_/:=.])(?=\w)")


def on_page_content(html: str, **_others: object) -> str:
    """Mark the joints of long names, but not in blocks of code. Called by mkdocs for each page."""
    parts = _BLOCK.split(html)
    parts[::2] = [_CODE.sub(_fitted, part) for part in parts[::2]]
    return "".join(parts)


def _fitted(code: re.Match[str]) -> str:
    if len(code[1]) < LONG:
        return code[0]
    broken = _JOINT.sub(r"\1<wbr>", code[1])
    size = "long" if len(code[1]) < LONGEST else "long longest"
    return f'<code class="{size}">{broken}</code>'
