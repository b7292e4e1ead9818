"""Draws the page of a file: its content shows whether it is a record, a replay or a soak."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from kvtier.errors import Misuse
from kvtier.tools.replay import curves
from kvtier.tools.replay.report import FORMAT
from kvtier.tools.replay.trace_lines import TraceFile, TraceLines
from kvtier.tools.report.policies_page import policies_page
from kvtier.tools.report.record import read_record_untrusted
from kvtier.tools.report.record_page import record_page
from kvtier.tools.report.replay_page import replay_page
from kvtier.tools.report.soak import SOAK
from kvtier.tools.report.soak_page import soak_page

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvtier.tools.report.page import ReportPage

_MALFORMED: Final = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError)
"""Exceptions from a report with missing or unexpected parts."""

REPORT_BYTES_MAX: Final = 1 << 28
BAD_LINES_SHOWN_MAX: Final = 5

_PAGES: Final = {FORMAT: replay_page, curves.REPORT: policies_page, SOAK: soak_page}
"""Functions that draw JSON reports, by the type in the report."""

_CAN_DRAW: Final = (
    "It has to be a record of an engine's requests (the option record), the JSON report of kvtier "
    "replay, or the report.json of a soak."
)


def page_of_file(path: str, *, skips: bool, on_progress: Callable[[int, int], None]) -> ReportPage:
    """Read a file and return its page. Raises ``Misuse``.

    ``skips``: continue after the bad lines of a record. ``on_progress``: as in ``read_trace``.
    """
    try:
        with Path(path).open("rb") as raw:
            file = TraceFile(raw)
            if file.is_record():
                return _page_of_record(file, Path(path), on_progress, skips=skips)
            text = file.read_all_untrusted(REPORT_BYTES_MAX)
    except OSError as error:
        raise Misuse(f"{path}: cannot be read: {error.strerror or error}.") from error
    figures = _figures_untrusted(text, path)
    if skips:
        raise Misuse(f"{path}: is no record, which --on-bad-line is for. Leave that out.")
    return page_of_report(figures, Path(path).name)


def page_of_report(figures: Mapping[str, Any], name: str) -> ReportPage:
    """Return the page of a JSON report; ``name`` is that of its file. Raises ``Misuse``."""
    said = figures.get("report", figures.get("format"))
    draw = _PAGES.get(said) if isinstance(said, str) else None
    if draw is None:
        raise Misuse(f"{name}: there is no page of such a file. {_CAN_DRAW}")
    try:
        return draw(figures, f"Drawn from {name}, a report of {said}.")
    except _MALFORMED as error:
        raise Misuse(
            f"{name}: is no whole report of {said} ({error}). Was another version of kvtier used?"
        ) from error


def _page_of_record(
    file: TraceFile, path: Path, on_progress: Callable[[int, int], None], *, skips: bool
) -> ReportPage:
    lines = TraceLines(path, "recorded", None, skips=skips)
    record = read_record_untrusted(file, lines, on_progress)
    notes = []
    if lines.bad_line_count:
        shown = "; ".join(f"line {at}: {why}" for at, why in lines.bad_lines[:BAD_LINES_SHOWN_MAX])
        notes.append(f"Bad lines that are left out: {lines.bad_line_count:,} ({shown}).")
    source = f"Drawn from {path.name}, a record with blocks of {lines.block_tokens} tokens."
    return record_page(record, f"kvtier record: {path.name}", source, notes)


def _figures_untrusted(text: bytes, path: str) -> dict[str, Any]:
    if _is_trace_untrusted(text):
        raise Misuse(
            f"{path}: is a trace, which has no results. Play it with kvtier replay --json, and "
            "draw that."
        )
    try:
        figures = msgspec.json.decode(text)
    except (ValueError, RecursionError) as error:
        raise Misuse(f"{path}: is not one JSON text ({error}). {_CAN_DRAW}") from error
    if not isinstance(figures, dict):
        raise Misuse(f"{path}: is not a JSON object. {_CAN_DRAW}")
    return figures


def _is_trace_untrusted(text: bytes) -> bool:
    try:
        fields = msgspec.json.decode(text.partition(b"\n")[0], type=dict[str, msgspec.Raw])
    except (ValueError, RecursionError):
        return False
    return not fields.keys().isdisjoint(("hash_ids", "blocks"))
