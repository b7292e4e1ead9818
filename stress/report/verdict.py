"""The verdict of a run: one screen, one JSON file, and one page."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

from stress.report.page import faults_of, page_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from stress.record import Record


def print_verdict(record: Record) -> None:
    """Print all that one has to know, on one screen."""
    last = record.samples[-1] if record.samples else None
    print(f"faults    {faults_of(record)}: {_counts(record.injected)}")
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
    (folder / "report.json").write_text(json.dumps(record.as_json(), indent=1) + "\n")
    (folder / "report.html").write_text(page_of(record))
