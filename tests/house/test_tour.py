"""The tour of the code, and its picture, name what is in the code.

That the files on it are there is checked with those of all pages (``test_docs.py``).
"""

from __future__ import annotations

import ast
import re

from pages import DOCS, in_code_type, section
from sources import ROOT, SHIPPED, tree_of
from test_rooms import MAY_IMPORT, UNBOUND

from kvtier.core import messages, wire
from kvtier.core.block_state import BlockState
from kvtier.engine.link.circuit_breaker import BreakerEvent, BreakerState
from kvtier.engine.primary.slot_table import SlotEvent, SlotState
from kvtier.hosts.life import LifeEvent, LifeState
from kvtier.plugin_api.backend import Outcome
from kvtier_backends.disk.log.regions import RegionEvent, RegionState

PAGE = (DOCS / "explanation/tour.md").read_text()
PICTURE = (DOCS / "explanation/state-machines.svg").read_text()

OF_TABLES = [
    *(BlockState, SlotState, SlotEvent, BreakerState, BreakerEvent),
    *(LifeState, LifeEvent, RegionState, RegionEvent, Outcome),
]
BOXES = {
    "A key": BlockState,
    "A slot": SlotState,
    "A circuit breaker": BreakerState,
    "A region": RegionState,
    "A life": LifeState,
}


def rows(title: str) -> list[list[list[str]]]:
    """Return the names in code type in each cell, for the rows of a section's first table."""
    found = re.findall(r"^\| (?!-)(.+) \|$", section(PAGE, title), re.MULTILINE)
    assert len(found) > 2, f"no table below {title}"
    return [[in_code_type(cell) for cell in row.split(" | ")] for row in found[1:]]


def test_the_rooms_are_those_of_the_house() -> None:
    shown = {room: set(may) for rooms, may in rows("The rooms") for room in rooms}
    assert shown.pop("tools") == set()
    assert shown == {room: may - {"kvtier"} for room, may in MAY_IMPORT.items() if room != "kvtier"}
    assert "tools" in UNBOUND


def test_there_are_ten_files_to_read() -> None:
    files = [file for _, (file,), *_ in rows("Ten files in an evening")]
    assert len(files) == len(set(files)) == 10
    assert all((ROOT / file).is_file() for file in files)


def test_every_method_and_message_that_the_page_names_is_there() -> None:
    """A method that was renamed leads a reader astray."""
    methods = {
        f"{each.name}.{one.name}"
        for path in SHIPPED
        for each in ast.walk(tree_of(path))
        if isinstance(each, ast.ClassDef)
        for one in each.body
        if isinstance(one, ast.FunctionDef)
    }
    named = set(re.findall(r"`(_?[A-Z]\w+\.\w+)`", PAGE)) - {"CONTRIBUTING.md", "CHANGELOG.md"}
    assert len(named) > 5
    assert not named - methods
    sent = {name for row in rows("How the state machines drive one another") for name in row[2]}
    sent = {name for name in sent if name.isidentifier() and name[0].isupper()}
    sent -= {each.name for each in Outcome}
    assert len(sent) > 8
    assert not {name for name in sent if not (hasattr(messages, name) or hasattr(wire, name))}


def test_every_state_and_event_on_the_picture_is_in_a_table_and_each_box_has_all_states() -> None:
    known = {each.name for table in OF_TABLES for each in table}
    texts = re.findall(r"<text[^>]*>(.*?)</text>", PICTURE)
    assert not {word for text in texts for word in re.findall(r"\b[A-Z_]{3,}\b", text)} - known
    for title, states in BOXES.items():
        x = re.search(rf'<text x="(\d+)" y="(\d+)" font-weight="600">{title}</text>', PICTURE)
        assert x, title
        inside = [
            text
            for left, top, text in re.findall(
                r'<text x="(\d+)" y="(\d+)">([A-Z_ ·]+)</text>', PICTURE
            )
            if left == x[1] and 0 < int(top) - int(x[2]) < 60
        ]
        assert " · ".join(inside).split(" · ") == [state.name for state in states], title
