"""Writes the reference's tables of options and metrics from their declarations.

They stand in the pages, between marks that name the class that declares them, so that a page
is whole wherever it is read. After a change of an option or a metric, or of its text::

    python docs/write_reference.py
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

from kvtier.core.metrics import backend_definitions, primary_definitions, tier_definitions
from kvtier.plugin_api.backend import Backend
from kvtier.plugin_api.option_fields import OptionField, options_of
from kvtier.plugin_api.options import INTEGER_MAX, REQUIRED, SECONDS_MAX, Options
from kvtier.settings.extra_config import VLLMOptions
from kvtier.settings.runtime_config import RuntimeConfig

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvtier.core.metrics import Definition

PAGES: Final = Path(__file__).parent / "reference"
OF_VLLM: Final = ("eviction_policy", "store_threshold", "max_tracker_size")
"""Keys of vLLM's that kvtier reads in its place."""


Rows: TypeAlias = dict[str, tuple[OptionField, str]]


def _rows(kind: type) -> Rows:
    """Return the options of a class by name, each with the text below its field."""
    texts = {}
    for owner in kind.__mro__[:-1]:
        (body,) = (
            node.body
            for node in ast.parse(inspect.getsource(sys.modules[owner.__module__])).body
            if isinstance(node, ast.ClassDef) and node.name == owner.__name__
        )
        for field, below in pairwise(body):
            match field, below:
                case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                    texts[name] = " ".join(text.split())
    return {key: (option, texts[key]) for key, option in options_of(kind).items()}


_RUNTIME: Final = _rows(RuntimeConfig)
_ENGINES: Final = {
    "vllm": _rows(VLLMOptions) | {key: _RUNTIME[key] for key in OF_VLLM},
    "kvtier": {key: option for key, option in _RUNTIME.items() if key not in OF_VLLM},
}
_MADE: Final = re.compile(
    r"^(<!-- made by docs/write_reference.py: ([\w.]+) -->\n).*?^(<!-- end -->)$",
    re.MULTILINE | re.DOTALL,
)
_WORDS: Final[dict[object, str]] = {
    Options.flag: "`true` or `false`",
    Options.mapping: "a mapping",
    Options.path: "a path",
    Options.size: "a size",
    Options.text: "a text",
}


def made(page: str) -> str:
    """Return a page with its tables made anew."""
    return _MADE.sub(lambda mark: f"{mark[1]}\n{_table(mark[2], page)}\n\n{mark[3]}", page)


def _table(name: str, page: str) -> str:
    if name == primary_definitions.__module__:
        return _metrics(primary_definitions() | tier_definitions())
    module, _, kind = name.rpartition(".")
    declares = getattr(import_module(module), kind) if module else None
    if isinstance(declares, type) and issubclass(declares, Backend):
        return _metrics(backend_definitions(declares.type_name, declares.metrics))
    return _options(_ENGINES[name] if declares is None else _rows(declares), page)


def _metrics(definitions: Mapping[str, Definition]) -> str:
    rows = ["| metric | type | labels | meaning |", "|---|---|---|---|"]
    for each in definitions.values():
        meaning = each.help[0].lower() + each.help[1:].rstrip(".")
        rows.append(f"| `{each.name}` | {each.kind} | {', '.join(each.labels)} | {meaning} |")
    return "\n".join(rows)


def _options(options: Rows, page: str) -> str:
    rows = ["| key | default | values | meaning |", "|---|---|---|---|"]
    for key, (option, about) in options.items():
        shown = f"`{key}`"
        if f"## {shown}\n" in page:
            shown = f"[{shown}](#{key})"
        rows.append(f"| {shown} | {_default(option)} | {_values(option)} | {about} |")
    return "\n".join(rows)


def _default(option: OptionField) -> str:
    default = option.default
    if default is REQUIRED:
        return "(required)"
    if default is None or default in ("", frozenset()):
        return "(none)"
    if isinstance(default, str | bool | tuple):
        return f"`{json.dumps(default)}`"
    return f"{default:g}" if isinstance(default, float) else str(default)


def _values(option: OptionField) -> str:
    """Return what is taken, without what the page says of all numbers and sizes."""
    bounds = {**(getattr(option.method, "__kwdefaults__", None) or {}), **option.bounds}
    if bounds.get("choices"):
        return " or ".join(f'`"{choice}"`' for choice in bounds["choices"])
    least, most = bounds.get("minimum"), bounds.get("maximum", INTEGER_MAX)
    if option.method in (Options.integer, Options.whole_seconds):
        bounded = f"{least} or more" if most == INTEGER_MAX else f"{least} to {most}"
        return f"a duration, {bounded}" if option.method is Options.whole_seconds else bounded
    if option.method in (Options.number, Options.seconds):
        upper = "" if most == SECONDS_MAX else f", up to {most:g}"
        bounded = f"above 0{upper}" if least is None else f"{least:g} to {most:g}"
        return f"a duration {bounded}" if option.method is Options.seconds else bounded
    words = "" if option.method is None else _WORDS[option.method]
    return f"{words} of {least} or more" if least else words


def main() -> None:
    """Write all pages."""
    for page in PAGES.rglob("*.md"):
        page.write_text(made(page.read_text()))


if __name__ == "__main__":
    main()
