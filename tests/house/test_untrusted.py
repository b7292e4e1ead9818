"""Whatever reads bytes of others catches all that a decoder raises, and nothing less.

What is no UTF-8 is a ``UnicodeDecodeError`` and no ``msgspec.DecodeError``, and what is nested too
deeply is a ``RecursionError``: both came through where only the decoder's own error was expected.
"""

from __future__ import annotations

import ast
import re

from sources import MODULES, tree_of

DECODES = re.compile(r"msgspec\.\w+\.decode|.*[dD](ecoder|ECODER)\.decode|json\.loads?")
CAUGHT = ({"ValueError", "RecursionError"}, {"Exception"})
OWN_ERRORS = re.compile(r"msgspec\.\w+|json\.JSONDecodeError|(Json|Unicode)DecodeError")
OWN_BYTES = {
    ("kvtier_backends.shared.namespaces", "as_json"): "decodes what it has just encoded",
    ("kvtier.vllm.identity.namespace", "build_namespace"): "as above",
    (
        "kvtier.vllm.memory.region_header",
        "read",
    ): "has compared the checksum of what this engine wrote",
    ("kvtier.tools.demo.__main__", "run_engine"): "a child of the command's own",
    ("kvtier.tools.demo.engine", "main"): "its parent's",
}


def names_of(handler: ast.ExceptHandler) -> set[str]:
    if handler.type is None:
        return {"Exception"}
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return {ast.unparse(kind) for kind in kinds}


def unguarded(node: ast.AST, caught: frozenset[str] = frozenset()) -> list[ast.Call]:
    """Return the calls that decode below a node, where not all is caught that they raise."""
    found = []
    if isinstance(node, ast.Call) and DECODES.fullmatch(ast.unparse(node.func)):
        found += [] if any(kinds <= caught for kinds in CAUGHT) else [node]
    if isinstance(node, ast.Try):
        inside = caught.union(*(names_of(handler) for handler in node.handlers))
        for each in node.body:
            found += unguarded(each, inside)
        rest: list[ast.AST] = [*node.handlers, *node.orelse, *node.finalbody]
    else:
        rest = list(ast.iter_child_nodes(node))
    for each in rest:
        found += unguarded(each, caught)
    return found


def test_what_decodes_catches_all_that_its_decoder_raises() -> None:
    found = [
        f"{module}.{function.name}, line {call.lineno}"
        for module in sorted(MODULES)
        for function in ast.walk(tree_of(MODULES[module]))
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        if (module, function.name) not in OWN_BYTES
        for call in unguarded(function)
    ]
    assert not found


def test_no_handler_waits_for_a_decoders_own_error_only() -> None:
    found = [
        f"{module}, line {node.lineno}: {ast.unparse(node.type)}"
        for module in sorted(MODULES)
        for node in ast.walk(tree_of(MODULES[module]))
        if isinstance(node, ast.ExceptHandler) and node.type is not None
        if any(OWN_ERRORS.fullmatch(name) for name in names_of(node))
    ]
    assert not found
