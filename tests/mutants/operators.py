"""The small changes that are made, one at a time: cosmic-ray's, and two that it lacks.

Left out is what no test need see: annotations, decorators, docstrings, assertions (they diagnose,
and safeguard nothing; so does ``strict=True``), imports, and what a log line says.
"""

from __future__ import annotations

import ast
import difflib
from typing import TYPE_CHECKING, NamedTuple

import cosmic_ray.plugins
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.operator import Operator
from parso.python.tree import Keyword

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import parso

    Position = tuple[int, int]

BINARY = ("Add_Sub", "Sub_Add", "Mul_FloorDiv", "FloorDiv_Mul", "Mod_FloorDiv", "Div_Mul")
BITS = ("LShift_RShift", "RShift_LShift", "BitOr_BitAnd", "BitAnd_BitOr", "BitXor_BitAnd")
COMPARISONS = ("Eq_NotEq", "NotEq_Eq", "Lt_LtE", "LtE_Lt", "Gt_GtE", "GtE_Gt", "Is_IsNot")
COMPARISONS_TOO = ("IsNot_Is", "Lt_GtE", "Gt_LtE", "GtE_Lt", "LtE_Gt")
OTHERS = (
    "AddNot",
    "ReplaceTrueWithFalse",
    "ReplaceFalseWithTrue",
    "ReplaceAndWithOr",
    "ReplaceOrWithAnd",
    "ReplaceBreakWithContinue",
    "ReplaceContinueWithBreak",
    "ReplaceUnaryOperator_Delete_Not",
    "ReplaceUnaryOperator_Delete_USub",
    "ReplaceUnaryOperator_Delete_Invert",
    "ExceptionReplacer",
    "NumberReplacer",
    "ZeroIterationForLoop",
)

UNSEEN = ("__init__", "audit", "_all_handlers")
"""Functions without which nothing runs at all, and what is kept for tests."""


class RemoveStatement(Operator):
    """Leaves out a call, an assignment to what outlives the function, or a returned value."""

    def mutation_positions(
        self, node: parso.tree.NodeOrLeaf
    ) -> Iterator[tuple[Position, Position]]:
        """Yield the statement, if it is one to leave out."""
        if node.type == "simple_stmt" and _may_go(node.children[0]):
            yield node.children[0].start_pos, node.children[0].end_pos

    def mutate(self, node: parso.tree.BaseNode, index: int) -> parso.tree.BaseNode:
        """Put ``pass`` or ``return None`` in its place."""
        gone = node.children[0]
        prefix = gone.get_first_leaf().prefix
        word = "return None" if gone.type == "return_stmt" else "pass"
        node.children[0] = Keyword(word, gone.start_pos, prefix)
        return node

    @classmethod
    def examples(cls) -> tuple[()]:
        """Return none: the tests have some."""
        return ()


class ReplaceIn(Operator):
    """``in`` becomes ``not in``, and the other way round."""

    def mutation_positions(
        self, node: parso.tree.NodeOrLeaf
    ) -> Iterator[tuple[Position, Position]]:
        """Yield the operator of a comparison."""
        if node.type == "comparison" and node.children[1].get_code().split() in _INS:
            yield node.children[1].start_pos, node.children[1].end_pos

    def mutate(self, node: parso.tree.BaseNode, index: int) -> parso.tree.BaseNode:
        """Turn it round."""
        operator = node.children[1]
        word = "not in" if operator.get_code().split() == ["in"] else "in"
        node.children[1] = Keyword(word, operator.start_pos, " ")
        return node

    @classmethod
    def examples(cls) -> tuple[()]:
        """Return none: the tests have some."""
        return ()


_INS = (["in"], ["not", "in"])


def _may_go(statement: parso.tree.NodeOrLeaf) -> bool:
    if statement.type == "return_stmt":
        return statement.children[1].get_code().strip() != "None"
    if statement.type == "expr_stmt":
        target = statement.children[0]
        sign = statement.children[1].get_code().strip()
        return target.type in ("power", "atom_expr") or sign[-1:] == "=" != sign
    return statement.type in ("power", "atom_expr", "del_stmt", "raise_stmt", "await_expr")


def operators() -> dict[str, Operator]:
    """Return all operators by name."""
    names = [
        *(f"ReplaceBinaryOperator_{each}" for each in (*BINARY, *BITS)),
        *(f"ReplaceComparisonOperator_{each}" for each in (*COMPARISONS, *COMPARISONS_TOO)),
        *OTHERS,
    ]
    found = {name: cosmic_ray.plugins.get_operator(f"core/{name}")() for name in names}
    return {**found, "RemoveStatement": RemoveStatement(), "ReplaceIn": ReplaceIn()}


class Mutant(NamedTuple):
    """One small change of a file."""

    operator: str
    occurrence: int
    line: int

    def source(self, original: str) -> str:
        """Return the file with the change."""
        return str(mutate_code(original, operators()[self.operator], self.occurrence))


def mutants_of(source: str) -> list[Mutant]:
    """Return all mutants of a file's source, from its first line to its last."""
    excluded = _excluded(ast.parse(source))
    nodes = list(ast_nodes(get_ast(source)))
    found = []
    for name, operator in operators().items():
        occurrence = 0
        for node in nodes:
            for start, _ in operator.mutation_positions(node):
                if not any(first <= start < last for first, last in excluded):
                    found.append(Mutant(name, occurrence, start[0]))
                occurrence += 1
    return sorted(found, key=lambda mutant: (mutant.line, mutant))


def difference(original: str, mutated: str) -> list[str]:
    """Return the lines that differ, with - and + before them."""
    lines = difflib.unified_diff(original.splitlines(), mutated.splitlines(), n=0, lineterm="")
    return [f"{line[0]} {line[1:].strip()}" for line in list(lines)[3:] if line[0] in "+-"]


def _excluded(tree: ast.Module) -> list[tuple[Position, Position]]:
    """Return the stretches of a file that are left as they are."""
    nodes: list[ast.AST | None] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            every = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
            nodes += [node.returns, *(each.annotation for each in every), *node.decorator_list]
            nodes += [each for each in node.body if node.name in UNSEEN]
        elif isinstance(node, ast.ClassDef):
            nodes += node.decorator_list
        elif isinstance(node, ast.AnnAssign):
            nodes.append(node.annotation)
        elif isinstance(node, ast.keyword) and node.arg == "strict":
            nodes.append(node.value)
        elif _is_unseen(node):
            nodes.append(node)
    return [
        ((node.lineno, node.col_offset), (node.end_lineno or 0, node.end_col_offset or 0))
        for node in nodes
        if isinstance(node, ast.expr | ast.stmt)
    ]


def _is_unseen(node: ast.AST) -> bool:
    if isinstance(node, ast.If):
        return ast.unparse(node.test) == "TYPE_CHECKING"
    if isinstance(node, ast.Call):
        return ast.unparse(node.func).startswith("log.")
    return isinstance(node, ast.Assert | ast.Import | ast.ImportFrom)


def read(path: Path) -> str:
    """Return a file's source."""
    return path.read_text(encoding="utf-8")
