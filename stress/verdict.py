"""The verdict of a run: one screen, one JSON file, and one page."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

from kvtier.tools.report.drawing import page_of_report

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from stress.record import Record


def print_verdict(record: Record) -> None:
    """Print all that one has to know, on one screen."""
    last = record.samples[-1] if record.samples else None
    rate = record.injected_a_minute
    much = "" if rate is None else f", {rate:,.0f} a minute"
    print(f"faults    {record.injected_total:,} injected{much}: {_counts(record.injected)}")
    if last is not None:
        ratio = last.hits / last.lookups if last.lookups else 0.0
        print(
            f"load      {last.requests:,} requests, {last.blocks_stored:,} blocks stored, "
            f"{last.blocks_read:,} read and right, hit ratio {ratio:.0%}"
        )
    for name, value in record.figures.items():
        print(f"{name:<9} {value:,.6g}")
    for tier, counts in record.noticed.items():
        print(f"{tier:<9} {_counts(counts)}")
    for name, result in record.checks.items():
        print(f"after     {name}: {result}")
    if record.failure is None:
        print(f"PASSED    {record.layer}, seed {record.seed}, {record.seconds:.0f} s")
    else:
        sys.stdout.flush()
        print(
            f"FAILED    {record.layer}, seed {record.seed}, after {record.seconds:.1f} s: "
            f"{record.failure}",
            file=sys.stderr,
        )


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counts.items() if count) or "none"


def write_report(record: Record, folder: Path) -> None:
    """Write ``report.json`` and ``report.html`` into a folder, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    figures = record.as_json()
    (folder / "report.json").write_text(json.dumps(figures, indent=1) + "\n")
    (folder / "report.html").write_text(page_of_report(figures, "report.json").html())
