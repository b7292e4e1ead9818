"""The page on trouble names each log event and metric that means trouble, and no other."""

from __future__ import annotations

import ast
import re

import pytest
from log_events import HOLE, events_in, events_of
from pages import DOCS, in_code_type, section
from sources import SHIPPED, name_of

from kvtier.tools.watching.readings import FAULTS, OF_TIER

PAGE = DOCS / "how-to/troubleshoot.md"


def first_cells(title: str) -> list[str]:
    """Return what stands in code type in the first column of the tables below a heading."""
    cells = re.findall(r"^\| ([^|]*) \|", section(PAGE.read_text(), title), re.MULTILINE)
    return [name for cell in cells for name in in_code_type(cell)]


def is_about(row: str, event: str) -> bool:
    """Tell whether a row is that of an event. ``…`` stands for any text."""
    return bool(re.fullmatch(".*".join(map(re.escape, row.split(HOLE))), event))


def test_every_warning_and_error_of_the_log_has_a_row_and_every_row_an_event() -> None:
    """An operator who searches for a line finds what it means, and what to do."""
    rows = first_cells("Log events")
    events = {event: name_of(path) for path in SHIPPED for event in events_in(path)}
    assert len(events) > 30
    assert not [(e, where) for e, where in events.items() if not any(is_about(r, e) for r in rows)]
    assert not [row for row in rows if not any(is_about(row, event) for event in events)]


def test_every_fault_of_a_tier_is_on_the_page_and_every_metric_of_the_page_exists() -> None:
    rows = first_cells("Metrics that mean trouble")
    assert {f"{OF_TIER[name]}_total" for name in FAULTS} <= set(rows)
    defined = (DOCS / "reference/metrics.md").read_text()
    assert not [row for row in rows if f"| `{row.removesuffix('_total')}` |" not in defined]


def test_every_kind_of_fault_on_the_page_is_a_counter_of_some_tier() -> None:
    pages = "".join(path.read_text() for path in (DOCS / "reference/tiers").glob("*.md"))
    kinds = first_cells("Faults of a tier's storage")
    assert len(kinds) > 10
    assert not [kind for kind in kinds if not re.search(rf"`kvtier:[a-z0-9]+_{kind}`", pages)]


WRITERS = """
from kvtier.plugin_api.log import log
EVENT = "constant"
class Writer:
    def plain(self, is_odd):
        log.warning("one" if is_odd else "two")
        event = f"three {is_odd}: {EVENT}"
        log.error(event, exc_info=True)
        log.info("not four")
    def forward(self, event, level):
        self.log.post(m.Notice(event, "tier", "", level, {}))
    def forwards(self):
        self.forward("five", "warning")
        self.forward("not six", "info")
"""


def test_events_are_found_however_they_are_written() -> None:
    """Otherwise the check above would miss some."""
    assert events_of(ast.parse(WRITERS), "writers.py") == {
        "one",
        "two",
        "three …: constant",
        "five",
    }


def test_an_event_that_cannot_be_seen_is_a_fault() -> None:
    hidden = ast.parse("def write(texts):\n    log.warning(texts[0])\n")
    with pytest.raises(AssertionError, match="nobody can tell which event"):
        events_of(hidden, "writers.py")
