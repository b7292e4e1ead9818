"""Lists what the adapter relies on in the installed vLLM: names, members, signatures.

What the adapter imports is found in its sources, and so is each attribute that it
mentions; of each class, the members of these names are listed. A line that ends
with "private" names what vLLM promises nobody::

    python -m tests.vllm.support.relied_on > tests/vllm/relied_on_0.32.txt
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import inspect
from importlib import import_module
from pathlib import Path
from typing import Any

ADAPTER = Path(__file__).parents[3] / "kvtier" / "vllm"
REACHED = (
    ("vllm.config", "VllmConfig"),
    ("vllm.config", "ModelConfig"),
    ("vllm.config", "CacheConfig"),
    ("vllm.config", "LoadConfig"),
    ("vllm.config", "ParallelConfig"),
    ("vllm.config", "SpeculativeConfig"),
    ("vllm.v1.kv_offload.config", "OffloadingCacheConfig"),
    ("vllm.v1.kv_offload.config", "OffloadingGroupConfig"),
    ("vllm.v1.kv_offload.config", "OffloadingModelConfig"),
    ("vllm.v1.kv_offload.config", "OffloadingParallelConfig"),
)
"""Classes whose objects come to the adapter without an import."""

_PLAIN = {*dir(int), *dir(str), *dir(tuple)}  # what a vLLM class has from Python's own


def lines() -> list[str]:
    """Return a line for each name, member and signature, sorted."""
    trees = [ast.parse(path.read_text()) for path in sorted(ADAPTER.rglob("*.py"))]
    mentioned = {name for tree in trees for name in _mentioned_by(tree)}
    found: set[str] = set()
    for module, name in {*REACHED, *(each for tree in trees for each in _imported_by(tree))}:
        home = import_module(module)
        # A module of a package is its attribute only once somebody has imported it.
        thing = getattr(home, name) if hasattr(home, name) else import_module(f"{module}.{name}")
        found |= set(_of(f"{module}.{name}", thing, mentioned))
    return sorted(found)


def _imported_by(tree: ast.AST) -> set[tuple[str, str]]:
    return {
        (node.module, alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm.")
        for alias in node.names
        if node.module
    }


def _mentioned_by(tree: ast.AST) -> set[str]:
    """Return the names of all attributes: looked at, defined, or asked for by ``getattr``."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.keyword) and node.arg:
            names.add(node.arg)
        elif isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value)
    return {name for name in names if name.isidentifier() and not name.startswith("__")}


def _of(path: str, thing: Any, mentioned: set[str]) -> list[str]:
    is_reached = tuple(path.rsplit(".", 1)) in REACHED
    found = [_line(path, ": class" if is_reached else _signature(thing))]
    if not inspect.isclass(thing):
        return found
    fields = {field.name for field in dataclasses.fields(thing)} if _is_data(thing) else set()
    for name in sorted(mentioned - _PLAIN):
        if name in fields:
            found.append(_line(f"{path}.{name}", ": field"))
        elif issubclass(thing, enum.Enum) and name in thing.__members__:
            found.append(_line(f"{path}.{name}", ": member"))
        elif hasattr(thing, name):
            found.append(_line(f"{path}.{name}", _signature(inspect.getattr_static(thing, name))))
    return found


def _is_data(thing: type) -> bool:
    return dataclasses.is_dataclass(thing)


def _signature(thing: Any) -> str:
    """Return the parameters with their kinds and whether they may be left out, or what it is."""
    if isinstance(thing, property):
        return ": property"
    if isinstance(thing, classmethod | staticmethod):
        thing = thing.__func__
    if not callable(thing):
        return ": attribute"
    if inspect.isclass(thing) and issubclass(thing, enum.Enum):
        return ": enum"
    try:
        parameters = inspect.signature(thing).parameters.values()
    except ValueError:
        return ": callable"
    bare = [
        each.replace(
            annotation=inspect.Parameter.empty,
            default=each.default if each.default is inspect.Parameter.empty else ...,
        )
        for each in parameters
    ]
    return str(inspect.Signature(bare)).replace("Ellipsis", "...")


def _line(path: str, what: str) -> str:
    is_private = any(part.startswith("_") for part in path.split("."))
    return f"{path}{what}" + ("  private" if is_private else "")


if __name__ == "__main__":
    print("\n".join(lines()))
