"""The files that kvtier ships, those that try it, and what each of them imports."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = sorted([*ROOT.glob("kvtier/**/*.py"), *ROOT.glob("backends/**/*.py")])
TRYING = sorted([*ROOT.glob("stress/**/*.py"), *ROOT.glob("tests/**/*.py")])


def name_of(path: Path) -> str:
    """Return the path as it is written in messages, relative to the repository."""
    return path.relative_to(ROOT).as_posix()


def module_of(path: Path) -> str:
    """Return the full name that a file is imported by."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts).removeprefix("backends.").removesuffix(".__init__")


MODULES = {module_of(path): path for path in SHIPPED}
TRYING_MODULES = {module_of(path): path for path in TRYING}
_ALL = MODULES | TRYING_MODULES


PATH_HEADS = "kvtier|kvtier_backends|backends|tests|stress|docs|requirements|benchmarks"


def missing_paths(text: str) -> set[str]:
    """Return which files and folders of the repository a text names and are not there.

    ``*`` stands for any.
    """
    found = re.findall(rf"(?<![\w/.-])((?:{PATH_HEADS})/[\w./*-]*)", text)
    folders = (ROOT, ROOT / "backends")
    named = {path.rstrip(".") for path in found}
    return {path for path in named if not any(list(each.glob(path)) for each in folders)}


@cache
def tree_of(path: Path) -> ast.Module:
    """Return the parsed file."""
    return ast.parse(path.read_text(), filename=name_of(path))


@cache
def imports_of(path: Path) -> frozenset[str]:
    """Return the full names of all modules that a file imports, wherever and however in it.

    A name that is imported from a package counts as its module if it is one.
    """
    names: set[str] = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)}:{node.lineno}: relative import"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                names.add(full if full in _ALL else node.module or "")
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            names.update(_imported_by_name(node, path))
    return frozenset(names)


def _imported_by_name(call: ast.Call, path: Path) -> set[str]:
    """Return the modules that ``import_module`` may import; ``{}`` in a name stands for any."""
    (name,) = call.args
    if isinstance(name, ast.Constant):
        return {name.value}
    head = name.values[0] if isinstance(name, ast.JoinedStr) else None
    if path in TRYING and not isinstance(head, ast.Constant):
        return set()  # a test imports what it is given
    assert isinstance(head, ast.Constant), f"{ast.unparse(call)}: nobody can tell what it imports"
    return {module for module in _ALL if module.startswith(head.value)}
