"""Attributes are read by their names, so that mypy knows when one is gone.

What reads ``getattr(thing, name)`` of a name that it made up reads nothing, without a word,
once the attribute is called something else.
"""

from __future__ import annotations

import ast

import pytest
from sources import MODULES, tree_of

AT_WORK = ("core", "engine", "hosts", "plugin_api", "runtime", "settings", "tier", "vllm")
READ_BY_NAME = {
    "kvtier.core.statistics": "counters are a mapping for whoever reads them all",
    "kvtier.plugin_api.eviction_policy": "policies may still define a method by its older name",
    "kvtier.plugin_api.log": "a structlog logger has a method for each level",
}


def is_at_work(module: str) -> bool:
    """Tell whether a module belongs to a running engine, and not to the tools beside it."""
    return module.split(".")[1:2] in [[room] for room in AT_WORK]


def reads_by_name(tree: ast.AST) -> list[str]:
    """Return where an attribute is read whose name isn't written there."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in {"getattr", "setattr", "vars"}:
            name = node.args[1] if len(node.args) > 1 else None
            if not isinstance(name, ast.Constant):
                found.append(f"line {node.lineno}: {ast.unparse(node)}")
        elif isinstance(node, ast.Attribute) and node.attr == "__dict__":
            found.append(f"line {node.lineno}: {ast.unparse(node)}")
    return found


@pytest.mark.parametrize("module", [each for each in sorted(MODULES) if is_at_work(each)])
def test_attributes_are_read_by_names_that_mypy_sees(module: str) -> None:
    """Slot states and counters reached vLLM by names put together from others."""
    found = reads_by_name(tree_of(MODULES[module]))
    assert bool(found) is (module in READ_BY_NAME), found
