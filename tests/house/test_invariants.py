"""Each ``# Invariant:`` of the actors says what checks it, and that does.

On both sides of a hand-over there is an assert, or a table without a row for it (style.md,
rule 7); what only a look at everything shows is an invariant of the model.
"""

from __future__ import annotations

import ast
import re

import pytest
from sources import MODULES, ROOT, tree_of

ROOMS = ("kvtier.core.", "kvtier.engine.", "kvtier.tier.", "kvtier_backends.disk.")
INVARIANT = re.compile(r"^ *# Invariant: .*(?:\n *# {4,}.*)*", re.MULTILINE)


def checks_of(tree: ast.AST) -> set[str]:
    """Return the names of functions that assert or raise, and of classes that have such."""
    return {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        if any(isinstance(each, ast.Assert | ast.Raise) for each in ast.walk(node))
    }


IN_THE_ACTORS = set().union(
    *(checks_of(tree_of(path)) for name, path in MODULES.items() if name.startswith(ROOMS))
)
IN_THE_MODEL = set().union(*(checks_of(tree_of(path)) for path in ROOT.glob("tests/model/*.py")))
INVARIANTS = [
    pytest.param(match.group(), id=f"{module}-{number}")
    for module, path in sorted(MODULES.items())
    if module.startswith(ROOMS)
    for number, match in enumerate(INVARIANT.finditer(path.read_text()))
]


@pytest.mark.parametrize("text", INVARIANTS)
def test_an_invariant_is_checked_where_it_says(text: str) -> None:
    """By the code that may break it, and by the model, which sees all of it."""
    promise, _, names = re.sub(r"\n *#", "", text).partition("Checked:")
    checks = set(re.findall(r"\w+", names))
    assert checks, f"{promise.strip()} Nothing is said to check it."
    assert checks & IN_THE_ACTORS
    assert checks & IN_THE_MODEL
    assert checks <= IN_THE_ACTORS | IN_THE_MODEL


def test_there_are_invariants() -> None:
    """Or the pattern finds none of them any more."""
    written = sum(
        path.read_text().count("# Invariant:")
        for name, path in MODULES.items()
        if name.startswith(ROOMS)
    )
    assert len(INVARIANTS) == written > 5
