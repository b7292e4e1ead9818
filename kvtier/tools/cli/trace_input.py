"""Reads a trace with a progress bar, and describes it."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from kvtier.tools.replay.traces import read_trace
from kvtier.tools.terminal import progress

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from kvtier.tools.cli.options import TraceOptions
    from kvtier.tools.replay.traces import Trace

STDIN: Final = "/dev/stdin"
BAD_LINES_SHOWN_MAX: Final = 5


def read_trace_in_sight(path: str | Path, reading: TraceOptions) -> Trace:
    """Read the trace with a progress bar; report skipped and sorted lines on stderr."""
    with reading_in_sight("reading the trace") as on_progress:
        trace = read_trace(
            STDIN if path == "-" else path,
            format=reading.format,
            block_tokens=reading.block_tokens,
            on_bad_line=reading.on_bad_line,
            limit=reading.limit,
            on_progress=on_progress,
        )
    for line in _notes(trace):
        print(f"{trace.name}: {line}", file=sys.stderr)
    return trace


@contextmanager
def reading_in_sight(label: str) -> Iterator[Callable[[int, int], None]]:
    """Show the progress of reading a file; yields the ``on_progress`` for ``read_trace``."""
    done = 0
    with progress(label, 100) as bar:

        def report(read: int, size: int) -> None:
            nonlocal done
            percent = 100 * read // size if size else 0
            bar.advance(percent - done)
            done = percent

        yield report


def describe(trace: Trace) -> dict[str, Any]:
    """Return the trace's part of a JSON report."""
    return {
        "name": trace.name,
        "format": trace.format,
        "block_tokens": trace.block_tokens,
        "requests": len(trace.requests),
        "references": trace.references,
        "distinct_blocks": trace.distinct_blocks,
        "seconds": trace.requests[-1].time_s,
        "bad_line_count": trace.bad_line_count,
        "bad_lines": [{"line": number, "what": what} for number, what in trace.bad_lines],
        "out_of_order_count": trace.out_of_order_count,
    }


def _notes(trace: Trace) -> list[str]:
    notes = []
    if trace.bad_line_count:
        notes.append(f"skipped {trace.bad_line_count:,} bad lines")
        notes += [
            f"line {number}: {what}" for number, what in trace.bad_lines[:BAD_LINES_SHOWN_MAX]
        ]
    if trace.out_of_order_count:
        notes.append(
            f"{trace.out_of_order_count:,} requests stood after later ones, and were sorted by time"
        )
    return notes
