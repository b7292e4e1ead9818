"""Writes the reference of the ``kvtier`` command from its parsers.

An mkdocs hook: the line ``<!-- commands -->`` on a page becomes a section for
each subcommand, with its usage and every option, so the page cannot drift from
the code. As a script it prints them::

    python docs/write_command_line.py
"""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING, Final

from kvtier.tools.cli.main import make_parser

if TYPE_CHECKING:
    from collections.abc import Iterator

_MARK: Final = re.compile(r"^<!-- commands -->$", re.MULTILINE)
_WIDTH: Final = 84
"""Columns of a usage line: what fits the page."""


def on_page_markdown(markdown: str, **_others: object) -> str:
    """Put the commands in place of their mark. Called by mkdocs for each page."""
    return _MARK.sub(lambda _: commands(), markdown)


def commands() -> str:
    """Return a section for each command, as Markdown."""
    return "\n\n".join(_section(parser) for parser in parsers(make_parser()))


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yield a parser, and those of its subcommands, in the order of their names."""
    yield parser
    for action in parser._actions:  # noqa: SLF001 - argparse has no other way to ask
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001 - the same
            for name in sorted(action.choices):
                yield from parsers(action.choices[name])


def _section(parser: argparse.ArgumentParser) -> str:
    parts = [f"{'#' * (1 + len(parser.prog.split()))} `{parser.prog}`"]
    if parser.prog == "kvtier":  # its own title is the page's
        parts = ["## `kvtier`"]
    parts.append(f"```text\n{_usage(parser)}\n```")
    parts.append(_prose(parser.description or ""))
    for group in parser._action_groups:  # noqa: SLF001 - as above
        rows = [row for action in group._group_actions for row in _rows(parser, action)]  # noqa: SLF001 - as above
        if not rows:
            continue
        title = group.title or ""
        if title not in ("options", "positional arguments"):
            parts.append(f"{title[:1].upper()}{title[1:]}:")
        head = "argument" if title == "positional arguments" else "option"
        parts.append("\n".join([f"| {head} | meaning |", "|---|---|", *rows]))
    return "\n\n".join(part for part in parts if part)


def _usage(parser: argparse.ArgumentParser) -> str:
    def formatter(prog: str) -> argparse.HelpFormatter:
        return argparse.HelpFormatter(prog, width=_WIDTH)

    parser.formatter_class = formatter
    return parser.format_usage().removeprefix("usage: ").rstrip().replace("\n       ", "\n")


def _prose(text: str) -> str:
    """Turn a docstring into Markdown; options, and what stands in braces, are code."""
    text = re.sub(r"``(.+?)``", r"`\1`", text).strip()
    return re.sub(r"(?<![\w`-])(--[a-z][\w-]*|\{\w+\})", r"`\1`", text)


def _rows(parser: argparse.ArgumentParser, action: argparse.Action) -> Iterator[str]:
    """Yield a row of the table: for one option, or for each subcommand."""
    if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001 - as in parsers
        for choice in sorted(action._choices_actions, key=lambda each: each.dest):  # noqa: SLF001
            anchor = f"{parser.prog} {choice.dest}".replace(" ", "-")
            yield f"| [`{choice.dest}`](#{anchor}) | {_prose(_cell(choice.help or ''))} |"
        return
    if isinstance(action, argparse._HelpAction) and " " in parser.prog:  # noqa: SLF001 - as above
        return  # said once, of the whole command
    help_text = (action.help or "") % {**vars(action), "prog": parser.prog}
    metavar = parser._get_formatter()._format_args(action, _placeholder(action))  # noqa: SLF001 - as above
    spelled = ", ".join(
        f"{option} {metavar}".strip() for option in action.option_strings or [metavar]
    )
    if not action.option_strings:
        spelled = metavar
    yield f"| `{_cell(spelled)}` | {_prose(_cell(help_text))} |"


def _placeholder(action: argparse.Action) -> str:
    return action.dest.upper() if action.option_strings else action.dest


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def main() -> None:
    """Print all of it."""
    print(commands())


if __name__ == "__main__":
    main()
