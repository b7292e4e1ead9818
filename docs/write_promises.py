"""Writes the table of proofs on the page of promises, from the tests that prove them.

A promise is proven in one place: by functions of the model named ``p7_...``, or by what is marked
``@pytest.mark.promise(7)`` in one folder of tests. After a change of these::

    python docs/write_promises.py
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Final, TypeAlias

ROOT: Final = Path(__file__).parents[1]
PAGE: Final = ROOT / "docs/explanation/promises.md"
LAYERS: Final = {
    "model": ("tests/model/*.py",),
    "rig": ("tests/rig/*.py",),
    "unit": ("tests/unit/**/*.py", "tests/vllm/*.py"),
}
_NAMED: Final = re.compile(r"p(\d+)_\w+")
_MARKED: Final = re.compile(r"pytest\.mark\.promise\((\d+)\)")
_TABLE: Final = re.compile(
    r"^(<!-- made by docs/write_promises.py -->\n).*?^(<!-- end -->)$", re.MULTILINE | re.DOTALL
)

Proofs: TypeAlias = dict[str, dict[str, list[str]]]
"""By layer, by file: the functions. An empty list: all of the file."""


def proofs() -> dict[int, Proofs]:
    """Return what proves each promise."""
    found: dict[int, Proofs] = {}
    for layer, patterns in LAYERS.items():
        for path in sorted(path for pattern in patterns for path in ROOT.glob(pattern)):
            text, is_model = path.read_text(), layer == "model"
            if not is_model and "promise(" not in text:  # of most, and to parse them takes seconds
                continue
            for number, name in _proving(ast.parse(text), is_model=is_model):
                files = found.setdefault(number, {}).setdefault(layer, {})
                names = files.setdefault(path.relative_to(ROOT).as_posix(), [])
                names += [name] if name else []
    return found


def _proving(tree: ast.Module, *, is_model: bool) -> list[tuple[int, str]]:
    """Return promise and name of each function that proves one; no name: the module does."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
            found += [(int(each), "") for each in _MARKED.findall(ast.unparse(node.value))]
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            named = _NAMED.fullmatch(node.name) if is_model else None
            marks = " ".join(map(ast.unparse, node.decorator_list))
            numbers = [*([named[1]] if named else []), *_MARKED.findall(marks)]
            found += [(int(each), node.name) for each in numbers]
    return found


def made(page: str) -> str:
    """Return the page with its table made anew."""
    rows = ["| promise | layer | proof |", "|---|---|---|"]
    for number, layers in sorted(proofs().items()):
        for layer, files in layers.items():
            shown = [
                ": ".join(filter(None, (f"`{path}`", ", ".join(f"`{each}`" for each in names))))
                for path, names in files.items()
            ]
            rows.append(f"| {number} | {layer} | {'; '.join(shown)} |")
    return _TABLE.sub(lambda mark: "\n".join((mark[1][:-1], *rows, "", mark[2])), page)


if __name__ == "__main__":
    PAGE.write_text(made(PAGE.read_text()))
