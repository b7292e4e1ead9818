"""The mutation driver's own rules: its files and tests are there, and its reasons are of today."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.mutants.rooms import ROOMS

ROOT = Path(__file__).resolve().parents[2]
EXPLAINED = ROOT / "tests/mutants/explained.txt"


@pytest.mark.parametrize("file", ROOMS)
def test_each_file_and_its_tests_are_there(file: str) -> None:
    """A file that was renamed would be mutated no more, and a test run on nothing."""
    assert (ROOT / file).is_file()
    for test in ROOMS[file]:
        path, _, name = test.partition("::")
        tree = ast.parse((ROOT / path).read_text())
        functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
        assert not name or name.partition("[")[0] in functions, test


def test_each_survivor_that_is_explained_has_a_reason_and_is_in_its_file() -> None:
    """Else it explains nothing, or the next mutant of that text by chance."""
    for line in EXPLAINED.read_text().splitlines():
        if not line.startswith("#"):
            file, changed, reason = line.split(" | ")
            assert reason
            before = changed.split(" + ")[0].removeprefix("- ")
            source = " ".join((ROOT / file).read_text().split())
            assert before.split(" - ")[0] in source, line
