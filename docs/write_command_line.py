"""Writes the reference of the ``kvtier`` command from its functions.

An mkdocs hook: the line ``<!-- commands -->`` on a page becomes a section for
each subcommand, with its usage and every option, so the page cannot drift from
the code. As a script it prints them::

    python docs/write_command_line.py
"""

from __future__ import annotations

import re
from typing import Final

from kvtier.tools.cli.main import make_app

_MARK: Final = re.compile(r"^<!-- commands -->$", re.MULTILINE)
_CONTENTS: Final = re.compile(r"(?ms)^#+ Table of Contents$.*?(?=^\*\*Commands)")


def on_page_markdown(markdown: str, **_others: object) -> str:
    """Put the commands in place of their mark. Called by mkdocs for each page."""
    return _MARK.sub(lambda _: commands(), markdown)


def commands() -> str:
    """Return a section for each command, as Markdown, without a table of contents of its own."""
    return _CONTENTS.sub("", make_app().generate_docs(output_format="markdown", heading_level=2))


def main() -> None:
    """Print all of it."""
    print(commands())


if __name__ == "__main__":
    main()
