"""The reference pages that are made from the code name all that the code has.

What must be there is found another way than the pages find it: options from the
parsers themselves, public names by importing the modules.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import inspect
import pkgutil
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import kvtier
import kvtier.plugin_api
from kvtier.tools.cli.main import COMMANDS, make_parser

if TYPE_CHECKING:
    from types import ModuleType

DOCS = Path(__file__).resolve().parents[2] / "docs"
PUBLIC = [
    "kvtier",
    "kvtier.testing",
    *(
        f"kvtier.plugin_api.{each.name}"
        for each in pkgutil.iter_modules(kvtier.plugin_api.__path__)
    ),
]


def hook(name: str) -> ModuleType:
    """Import a hook of the docs, which are no package."""
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def made(page: str, by: str) -> str:
    """Return a page as mkdocs hands it on."""
    text: str = hook(by).on_page_markdown((DOCS / "reference" / page).read_text())
    assert "<!--" not in text
    return text


@pytest.fixture(scope="module")
def command_line() -> str:
    return made("command-line.md", "write_command_line")


@pytest.fixture(scope="module")
def python_api() -> str:
    return made("python-api.md", "write_python_api")


def all_parsers(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Return a parser and those below it, by what is typed."""
    found = {parser.prog: parser}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for one in action.choices.values():
                found |= all_parsers(one)
    return found


def section(page: str, title: str) -> str:
    """Return what stands under a heading, up to the next heading of any level."""
    found = re.search(
        rf"^#+ {re.escape(title)}(?: \{{.*\}})?\n(.*?)(?=^#+ |\Z)", page, re.MULTILINE | re.DOTALL
    )
    assert found, f"no heading {title}"
    return found[1]


def test_every_command_and_option_is_on_its_page(command_line: str) -> None:
    found = all_parsers(make_parser())
    assert {f"kvtier {name}" for name in COMMANDS} < set(found)
    for typed, parser in found.items():
        text = section(command_line, f"`{typed}`")
        for action in parser._actions:
            if isinstance(action, argparse._HelpAction | argparse._SubParsersAction):
                continue
            for name in action.option_strings or [str(action.metavar or action.dest)]:
                row = re.search(rf"^\| `(?:[^`]*, )?{name}[ ,`].*\| (.+) \|$", text, re.MULTILINE)
                assert row, f"{typed}: no row for {name}"
                assert len(row[1].split()) > 1, f"{typed} {name}: says too little"


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_on_its_page(name: str, python_api: str) -> None:
    assert f"## `{name}`" in python_api
    module = importlib.import_module(name)
    for public in getattr(module, "__all__", None) or defined_in(module):
        assert f"{{ #{name}.{public} }}" in python_api, f"{name}.{public} is not on the page"
        thing = getattr(module, public)
        if inspect.isclass(thing) and thing.__module__.startswith("kvtier"):
            title = f"class `{public}` {{ #{name}.{public} }}"
            text = python_api.partition(title)[2].partition("\n### ")[0]
            missing = [one for one in members(thing) if not re.search(rf"\b{one}\b", text)]
            assert not missing, f"{name}.{public}: {missing} not on the page"


def defined_in(module: ModuleType) -> list[str]:
    """Return the names that a module defines itself, or assigns, and does not hide."""
    own = []
    for name, thing in vars(module).items():
        if name.startswith("_") or inspect.ismodule(thing):
            continue
        is_made_here = getattr(thing, "__module__", None) == module.__name__
        if is_made_here and (inspect.isclass(thing) or inspect.isfunction(thing)):
            own.append(name)
    return own


def members(thing: type) -> list[str]:
    """Return the methods, properties and fields that a class itself has for others."""
    return [
        name
        for name in {**vars(thing), **inspect.get_annotations(thing)}
        if not name.startswith("_")
    ]


def test_the_python_api_is_what_third_parties_may_import_and_no_more() -> None:
    """A module of another folder on the page would be a promise that the folders do not make."""
    page = (DOCS / "reference" / "python-api.md").read_text()
    assert sorted(re.findall(r"^<!-- api: (.*) -->$", page, re.MULTILINE)) == sorted(PUBLIC)


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_says_what_it_is(name: str) -> None:
    """An entry of the page without a text would only repeat the name."""
    text = hook("write_python_api").module(name)
    bare = re.findall(
        r"^### (.*?) \{.*\}\n\n```python\n[^`]*```\n\n(?=#|\Z)", f"{text}\n\n", re.MULTILINE
    )
    assert not bare


def test_long_names_may_break_at_their_joints_and_short_ones_and_code_blocks_stay() -> None:
    """Browsers broke keys in the midst of a word, in tables and in text."""
    fit = hook("fit_names").on_page_content
    long = "kvtier:tier_promotions_dropped"
    assert fit(f"<td><code>{long}</code></td>") == (
        '<td><code class="long">kvtier:<wbr>tier_<wbr>promotions_<wbr>dropped</code></td>'
    )
    for kept in ("<p><code>--block-bytes SIZE</code></p>", f"<pre><code>{long}</code></pre>"):
        assert fit(kept) == kept
