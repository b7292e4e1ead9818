"""Draws state machines from their tables in the code, as a diagram and as a table.

An mkdocs hook: a line ``<!-- states: SLOT_TABLE -->`` on a page becomes the
drawing of that table, so the pages cannot drift from the code. One of the form
``<!-- meanings: BlockState -->`` becomes a list of states and what they mean. As a
script it prints all of them::

    python docs/draw_states.py
"""

from __future__ import annotations

import inspect
import re
from typing import TYPE_CHECKING, Any, Final

from kvtier.core.block_state import BlockState
from kvtier.engine.link.circuit_breaker import BREAKER_TABLE
from kvtier.engine.primary.slot_table import SLOT_TABLE
from kvtier.hosts.life import LIFE_TABLE
from kvtier_backends.disk.log.regions import REGION_TABLE

if TYPE_CHECKING:
    from collections.abc import Mapping
    from enum import IntEnum

TABLES: Final[Mapping[str, Mapping[Any, IntEnum]]] = {
    "SLOT_TABLE": SLOT_TABLE,
    "BREAKER_TABLE": BREAKER_TABLE,
    "LIFE_TABLE": LIFE_TABLE,
    "REGION_TABLE": REGION_TABLE,
}
KINDS: Final[Mapping[str, type[IntEnum]]] = {"BlockState": BlockState}
_MARK = re.compile(r"^<!-- states: (\w+) -->$", re.MULTILINE)
_KIND_MARK = re.compile(r"^<!-- meanings: (\w+) -->$", re.MULTILINE)
_MEMBER = re.compile(r"^    ([A-Z_]+) = \d+(?:\s+#: (.*))?$", re.MULTILINE)


def draw(name: str) -> str:
    """Return the drawing of one table, as Markdown. Raises ``KeyError`` for an unknown name."""
    if name not in TABLES:
        raise KeyError(f"no table {name!r}; known: {', '.join(TABLES)}")
    table: Mapping[tuple[IntEnum, IntEnum], IntEnum] = TABLES[name]
    return "\n\n".join([_diagram(table), _meanings(type(next(iter(table.values())))), _rows(table)])


def on_page_markdown(markdown: str, **_others: object) -> str:
    """Put the drawings in place of their marks. Called by mkdocs for each page."""
    drawn = _MARK.sub(lambda mark: draw(mark.group(1)), markdown)
    return _KIND_MARK.sub(lambda mark: _meanings(KINDS[mark.group(1)]), drawn)


def _diagram(table: Mapping[tuple[IntEnum, IntEnum], IntEnum]) -> str:
    """One line a state: where it can go, and by what."""
    moves: dict[IntEnum, list[tuple[str, str]]] = {}
    for (state, event), to in table.items():
        moves.setdefault(state, []).append((event.name, to.name))
    state_width = max(len(state.name) for state in moves)
    event_width = max(len(event.name) for _, event in table)
    lines = []
    for state, leaving in moves.items():
        for number, (event_name, to_name) in enumerate(leaving):
            start = state.name if number == 0 else ""
            bar = "──" if number == 0 else ("└─" if number == len(leaving) - 1 else "├─")
            lines.append(f"{start:<{state_width}} {bar} {event_name:─<{event_width}}─→ {to_name}")
    return "```text\n" + "\n".join(lines) + "\n```"


def _meanings(kind: type[IntEnum]) -> str:
    """Say what each state means: the comments beside the members."""
    lines = ["| state | meaning |", "|---|---|"]
    lines += [f"| {name} | {text} |" for name, text in _MEMBER.findall(inspect.getsource(kind))]
    return "\n".join(lines)


def _rows(table: Mapping[tuple[IntEnum, IntEnum], IntEnum]) -> str:
    """Return every legal move; there are no others."""
    lines = ["| from | event | to |", "|---|---|---|"]
    lines += [
        f"| {state.name} | {event.name} | {to.name} |" for (state, event), to in table.items()
    ]
    return "\n".join(lines)


def main() -> None:
    """Print all tables."""
    for name in TABLES:
        print(f"{name}\n\n{draw(name)}\n")


if __name__ == "__main__":
    main()
