"""How many lines and files each folder may have: a budget that only falls.

A change that needs more lines takes them from elsewhere, and its commit says from where. One that
needs less lowers the budget: the test asks for it once a folder has ``SPARE`` less than its budget.
``python tests/house/test_budgets.py`` writes today's figures.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from sources import ROOT, SHIPPED, TRYING

BUDGETS = Path(__file__).with_name("budgets.json")
SPARE = 0.03
SPARE_LINES = 60
DEEP = {
    ("backends", "kvtier_backends"),
    ("kvtier", "engine"),
    ("kvtier", "vllm"),
    ("tests", "unit"),
    ("tests", "unit", "backends"),
    ("tests", "vllm"),
}
"""The folders in these are counted one by one."""
NEW_BACKEND = [2500, 20]
"""What a backend may have, and its tests, while they have no budget of their own."""


def folder_of(path: Path) -> str:
    """Return the folder whose budget a file counts for."""
    parts = path.relative_to(ROOT).parent.parts
    depth = 1 + max((len(deep) for deep in DEEP if parts[: len(deep)] == deep), default=1)
    return "/".join(parts[:depth])


def counted() -> dict[str, tuple[int, int]]:
    """Return for each folder its lines and files."""
    lines: Counter[str] = Counter()
    files: Counter[str] = Counter()
    for path in (*SHIPPED, *TRYING):
        lines[folder_of(path)] += len(path.read_text().splitlines())
        files[folder_of(path)] += 1
    return {folder: (lines[folder], files[folder]) for folder in sorted(lines)}


def test_no_folder_has_more_than_its_budget() -> None:
    today = counted()
    parents = ("backends/kvtier_backends/", "tests/unit/backends/")
    budgets = {folder: NEW_BACKEND if folder.startswith(parents) else [0, 0] for folder in today}
    budgets |= json.loads(BUDGETS.read_text())
    over = {
        folder: f"{has} lines and files, {budgets[folder]} allowed"
        for folder, has in today.items()
        if any(n > most for n, most in zip(has, budgets[folder], strict=True))
    }
    assert not over


def test_what_a_folder_needs_no_more_is_taken_from_its_budget() -> None:
    today = counted()
    loose = {
        folder: f"{today.get(folder, (0, 0))} lines and files, {[lines, files]} allowed"
        for folder, (lines, files) in json.loads(BUDGETS.read_text()).items()
        if today.get(folder, (0, 0))[0] < lines * (1 - SPARE) - SPARE_LINES
    }
    assert not loose


if __name__ == "__main__":
    rows = (f'  "{folder}": [{lines}, {files}]' for folder, (lines, files) in counted().items())
    BUDGETS.write_text("{\n" + ",\n".join(rows) + "\n}\n")
