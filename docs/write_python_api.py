"""Writes the reference of the public Python API from the docstrings.

An mkdocs hook: a line ``<!-- api: kvtier.plugin_api.options -->`` on a page
becomes a section with that module's public names, so the page cannot drift from
the code. The source is read, not imported. As a script it prints a module::

    python docs/write_python_api.py kvtier.plugin_api.options
"""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterator

Definition: TypeAlias = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
Assignment: TypeAlias = ast.Assign | ast.AnnAssign

_MARK: Final = re.compile(r"^<!-- api: ([\w.]+) -->$", re.MULTILINE)
_NO_TYPE: Final = {"Final", "TypeAlias"}


def on_page_markdown(markdown: str, **_others: object) -> str:
    """Put the modules in place of their marks. Called by mkdocs for each page."""
    return _MARK.sub(lambda mark: module(mark.group(1)), markdown)


def module(name: str) -> str:
    """Return the section of one module, as Markdown."""
    tree, _ = _read(name)
    parts = [f"## `{name}` {{ #{name} }}", _prose(ast.get_docstring(tree))]
    for public in public_names(name):
        home, node = _find(name, public)
        anchor = f"{{ #{name}.{public} }}"
        if isinstance(node, ast.ClassDef):
            parts += [f"### class `{public}` {anchor}", *_class(home, node)]
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            parts += [f"### `{public}()` {anchor}", _signature(node), _doc(node)]
        else:
            parts += [f"### `{public}` {anchor}", _code(_value(node)), _said_of(home, node)]
    return "\n\n".join(part for part in parts if part)


def public_names(name: str) -> list[str]:
    """Return the names that a module has for others: of ``__all__``, or without a ``_``."""
    tree, _ = _read(name)
    own = []
    for node in tree.body:
        if isinstance(node, Definition):
            own.append(node.name)
        elif isinstance(node, Assignment):
            target = _target(node)
            if target == "__all__":
                return sorted(ast.literal_eval(node.value), key=str.lower)  # type: ignore[arg-type]
            own.append(target)
    # `T = TypeVar("T")` is nobody's to import.
    return [each for each in own if each and not each.startswith("_") and len(each) > 1]


@cache
def _read(name: str) -> tuple[ast.Module, tuple[str, ...]]:
    """Return a module's parsed source, and its lines."""
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).read_text()
    return ast.parse(source), tuple(source.splitlines())


def _find(name: str, public: str) -> tuple[str, ast.stmt]:
    """Return where a public name is defined, and how: through any number of imports."""
    for node in _read(name)[0].body:
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                if (alias.asname or alias.name) == public:
                    return _find(node.module, alias.name)
        elif (isinstance(node, Definition) and node.name == public) or (
            isinstance(node, Assignment) and _target(node) == public
        ):
            return name, node
    raise KeyError(f"{name} has no {public}")


def _class(home: str, node: ast.ClassDef) -> Iterator[str]:
    """Yield what is to be said of a class, its fields and its methods."""
    bases = ", ".join(ast.unparse(base) for base in node.bases)
    yield _code(f"class {node.name}({bases})" if bases else f"class {node.name}")
    yield _doc(node)
    fields = [
        (_field(each), _said_of(home, each))
        for each in node.body
        if isinstance(each, Assignment) and not _target(each).startswith("_")
    ]
    if fields:
        rows = [f"| `{field}` | {_cell(said)} |" for field, said in fields]
        yield "\n".join(["| attribute | meaning |", "|---|---|", *rows])
    for each in node.body:
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) and _is_public(each):
            yield _signature(each)
            yield _member(_doc(each))


def _member(text: str) -> str:
    """Set a method's text in, paragraph by paragraph."""
    paragraphs = text.split("\n\n") if text else []
    return "\n\n".join(
        each if each.startswith("    ") else f"{each}\n{{ .member }}" for each in paragraphs
    )


def _is_public(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Tell whether to show a method: a constructor too, if it takes anything."""
    if node.name == "__init__":
        return len(node.args.args) + len(node.args.kwonlyargs) > 1
    return not node.name.startswith("_") or node.name == "__len__"


def _signature(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Return the head of a function, in one line or with a line for each argument."""
    arguments = ast.unparse(node.args)
    marks = "".join(
        f"@{name}\n" for each in node.decorator_list if (name := ast.unparse(each)) != "override"
    )
    head = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    line = f"{head} {node.name}({arguments}){returns}"
    if len(line) > 80:
        line = f"{head} {node.name}(\n    {_broken(node.args)},\n){returns}"
    return _code(f"{marks}{line}")


def _broken(arguments: ast.arguments) -> str:
    """Return the arguments with a line for each."""
    parts, depth, current = [], 0, ""
    for sign in ast.unparse(arguments):
        depth += (sign in "([{") - (sign in ")]}")
        if sign == "," and not depth:
            parts.append(current.strip())
            current = ""
        else:
            current += sign
    return ",\n    ".join([*parts, current.strip()])


def _target(node: Assignment) -> str:
    target = node.targets[0] if isinstance(node, ast.Assign) else node.target
    return target.id if isinstance(target, ast.Name) else ""


def _field(node: Assignment) -> str:
    """Return an attribute as its class declares it; a member of an enum by its name and value."""
    kind = f": {ast.unparse(node.annotation)}" if isinstance(node, ast.AnnAssign) else ""
    value = f" = {ast.unparse(node.value)}" if node.value is not None else ""
    return f"{_target(node)}{kind}{value if len(value) < 40 else ' = ...'}"


def _value(node: ast.stmt) -> str:
    """Return a constant or an alias, without what only a type checker wants."""
    assert isinstance(node, Assignment)
    value = ast.unparse(node.value) if node.value is not None else "..."
    kind = ""
    if isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation) not in _NO_TYPE:
        kind = f": {ast.unparse(node.annotation).removeprefix('Final[').removesuffix(']')}"
    return f"{_target(node)}{kind} = {value if len(value) < 60 else '...'}"


def _said_of(home: str, node: ast.stmt) -> str:
    """Return what is said of an assignment: a ``#:`` beside or above it, or a text below it."""
    tree, lines = _read(home)
    after = {
        id(one): other
        for parent in ast.walk(tree)
        if isinstance(parent, ast.Module | ast.ClassDef)
        for one, other in zip(parent.body, parent.body[1:], strict=False)
    }.get(id(node))
    if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
        return _prose(str(after.value.value))
    beside = re.search(r"#: (.*)$", lines[(node.end_lineno or node.lineno) - 1])
    if beside:
        return _prose(beside[1])
    above: list[str] = []
    for line in reversed(lines[: node.lineno - 1]):
        if not line.strip().startswith("#:"):
            break
        above.insert(0, line.strip().removeprefix("#:").strip())
    return _prose(" ".join(above))


def _doc(node: Definition) -> str:
    return _prose(ast.get_docstring(node))


def _prose(text: str | None) -> str:
    """Turn a docstring into Markdown: code in double backquotes, and blocks after ``::``."""
    parts = []
    is_code = False
    for paragraph in re.split(r"\n\n+", (text or "").strip()):
        if is_code and paragraph.startswith("    "):
            parts.append(paragraph)
            continue
        is_code = paragraph.endswith("::")
        parts.append(re.sub(r"``(.+?)``", r"`\1`", re.sub(r"::$", ":", paragraph)))
    return "\n\n".join(parts)


def _code(source: str) -> str:
    return f"```python\n{source}\n```"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def main() -> None:
    """Print the modules that are named."""
    for name in sys.argv[1:]:
        print(f"{module(name)}\n")


if __name__ == "__main__":
    main()
