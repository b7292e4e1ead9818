"""Each state has one owner: nobody else assigns it, once it is constructed."""

from __future__ import annotations

import ast

import pytest
from sources import MODULES, tree_of

ACTORS = ("kvtier.core.", "kvtier.engine.", "kvtier.tier.", "kvtier.hosts.", "kvtier.runtime")
CONTRACT = {"self._backend.on_lost"}
"""What the protocol says that the runtime sets."""


def assigned_of(tree: ast.AST) -> list[ast.Attribute]:
    """Return all attributes that are assigned. Counting up (``+=``) is what counts are for."""
    found = []
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign) else []
        for target in targets:
            each = target.elts if isinstance(target, ast.Tuple) else [target]
            found += [part for part in each if isinstance(part, ast.Attribute)]
    return found


@pytest.mark.parametrize("module", [each for each in sorted(MODULES) if each.startswith(ACTORS)])
def test_nobody_assigns_what_another_object_owns(module: str) -> None:
    """Through an attribute of one's own, that is; whoever wires objects passes them on."""
    through = [
        f"line {target.lineno}: {ast.unparse(target)}"
        for target in assigned_of(tree_of(MODULES[module]))
        if isinstance(target.value, ast.Attribute) or module == "kvtier.runtime"
        if ast.unparse(target.value) != "self" and ast.unparse(target) not in CONTRACT
    ]
    assert not through
