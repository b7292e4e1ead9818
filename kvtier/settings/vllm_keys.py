"""Finds the configuration keys that the installed vLLM knows, from its source, not by import.

kvtier refuses unknown keys, because most of them are misspelt. A vLLM that is newer than
this kvtier may have new keys, and a configuration that uses them must not keep an engine from
starting. So an unknown key is looked for in vLLM's own code: where it reads
``kv_connector_extra_config``, and in the parameters of its tier's constructor. One that is found
there is ignored, with a warning. So is one that vLLM's tiering needs, and kvtier does not.

The source is read at the first unknown key, which no ordinary start has.
"""

from __future__ import annotations

import ast
import importlib.util
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvtier.plugin_api.log import log

if TYPE_CHECKING:
    from collections.abc import Iterator

_READERS: Final = ("v1/kv_offload", "distributed/kv_transfer/kv_connector/v1/offloading")
_FACTORY: Final = "v1/kv_offload/tiering/factory.py"
_SOURCE_BYTES_MAX: Final = 1 << 22

_OURS_TOO: Final = {
    "fs": frozenset(
        {"root_dir", "n_read_threads", "n_write_threads", "layout", "allow_unchecksummed", "direct"}
    )
}
"""Options of kvtier's tiers of the same type: these are never ignored."""

NOT_NEEDED: Final = {
    "backpressure": "kvtier limits the work in flight itself, see cascade_slots_fraction_max"
}
"""Keys of vLLM's tiering, and of each of its tiers, that kvtier does without."""

_NOT_OPTIONS: Final = frozenset(
    {"self", "offloading_spec", "primary_kv_view", "tier_type", "backpressure_detector"}
)
"""Arguments that vLLM itself passes to a tier's constructor."""


class VLLMKeys:
    """Returns whether to ignore an unknown key, and warns of each ignored one, once."""

    def __init__(self, package: str | None = None) -> None:
        """``package``: vLLM's folder; by default that of the one that an import would find."""
        self._package = package
        self._warned: set[tuple[str, str]] = set()

    def __call__(self, key: str, tier_type: str | None = None) -> bool:
        """Return whether vLLM has a key, of a tier or of the top level. Raises nothing."""
        reason = NOT_NEEDED.get(key)
        is_known = reason is not None or self._is_read(key, tier_type)
        if is_known and (key, tier_type or "") not in self._warned:
            self._warned.add((key, tier_type or ""))
            where = "kv_connector_extra_config" if tier_type is None else f"tier type {tier_type}"
            log.warning(
                "a key of vLLM's is ignored",
                key=key,
                where=where,
                reason=reason or "it is newer than this kvtier; vLLM's connector may still read it",
            )
        return is_known

    def _is_read(self, key: str, tier_type: str | None) -> bool:
        package = self._package or _vllm_folder()
        if package is None:
            return False
        if tier_type is None:
            return key in keys_of_connector(package)
        if tier_type not in _OURS_TOO or key in _OURS_TOO[tier_type]:
            return False
        return key in keys_of_tier(package, tier_type)


@cache
def keys_of_connector(package: str) -> frozenset[str]:
    """Return the keys that vLLM's offloading code reads from ``kv_connector_extra_config``."""
    paths = [path for part in _READERS for path in sorted(Path(package, part).rglob("*.py"))]
    # Below this folder lie the tiers, which use the same name for their own options.
    tiers = Path(package, _FACTORY).parent
    paths = [path for path in paths if tiers not in path.parents or path.parent == tiers]
    return frozenset(key for path in paths for key in _keys_read(_tree(path)))


@cache
def keys_of_tier(package: str, tier_type: str) -> frozenset[str]:
    """Return the options that vLLM's tier of this type takes; none if it has no such tier."""
    for node in ast.walk(_tree(Path(package, _FACTORY))):
        if not (isinstance(node, ast.Call) and _name(node.func) == "register_tier"):
            continue
        words = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
        if len(words) == 3 and words[0] == tier_type:
            module = str(words[1]).partition(".")[2].replace(".", "/")
            return _parameters(_tree(Path(package, f"{module}.py")), str(words[2]))
    return frozenset()


def _keys_read(tree: ast.AST) -> Iterator[str]:
    """Yield the keys in ``extra_config.get("key")`` and ``extra_config["key"]``."""
    for node in ast.walk(tree):
        key: ast.expr | None = None
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            of = node.func.value
            is_read = node.func.attr in ("get", "pop") and _name(of).endswith("extra_config")
            if is_read or node.func.attr == "get_from_extra_config":
                key = node.args[0]
        elif isinstance(node, ast.Subscript) and _name(node.value).endswith("extra_config"):
            key = node.slice
        if isinstance(key, ast.Constant) and isinstance(key.value, str):
            yield key.value


def _parameters(tree: ast.AST, class_name: str) -> frozenset[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name == class_name:
            for item in node.body:
                if isinstance(item, ast.FunctionDef) and item.name == "__init__":
                    arguments = [*item.args.args, *item.args.kwonlyargs]
                    return frozenset(each.arg for each in arguments) - _NOT_OPTIONS
    return frozenset()


def _name(node: ast.AST) -> str:
    """Return the last part of a dotted name; "" for another expression."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _tree(path: Path) -> ast.AST:
    """Parse a file; return an empty module if it can't be read or parsed."""
    try:
        with path.open("rb") as file:
            return ast.parse(file.read(_SOURCE_BYTES_MAX))
    except (OSError, SyntaxError, ValueError, RecursionError):
        return ast.Module(body=[], type_ignores=[])


def _vllm_folder() -> str | None:
    try:
        spec = importlib.util.find_spec("vllm")
    except (ImportError, ValueError):
        return None
    places = None if spec is None else spec.submodule_search_locations
    return next(iter(places), None) if places else None
