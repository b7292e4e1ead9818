"""The whole class: no call on a file names a path where it could name an open folder."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvtier_backends.fs import open_root

if TYPE_CHECKING:
    from collections.abc import Iterator

FS_SOURCES = sorted(Path(open_root.__file__).parent.glob("*.py"))
PATH_HELPERS = {"check_folder", "filesystem_of", "make_folders", "nearest"}  # of ``posix``
PATH_CALLS = {"open", "stat", "lstat", "mkdir", "rename", "replace", "unlink", "scandir", "listdir"}
MAY_NAME_PATHS = {
    "OpenRoot.__init__": "the root, where links may lead",
    "RootHandle._check": "what the path names now",
    "RootHandle._path_is_gone": "a root that was deleted on the same filesystem",
    "prepare_root": "the root, at the start",
    "_names": "an open descriptor",
    "names_in": "an open descriptor",
    "FsBackend.check_options": "the root, before anything is there",
}


@pytest.mark.parametrize("source", FS_SOURCES, ids=lambda path: path.name)
def test_every_call_on_a_file_names_an_open_folder(source: Path) -> None:
    """A path could lead anywhere by the time it is used."""
    tree = ast.parse(source.read_text())
    found = [
        f"{name}: {ast.unparse(call.func)}, line {call.lineno}"
        for function, name in functions_of(tree)
        if name not in MAY_NAME_PATHS
        for call in ast.walk(function)
        if isinstance(call, ast.Call) and names_a_path(call)
    ]
    assert found == []


def names_a_path(call: ast.Call) -> bool:
    """Tell whether a call is given a path, and no open folder that the path is relative to."""
    if isinstance(call.func, ast.Name):
        return call.func.id in PATH_HELPERS
    module, _, name = ast.unparse(call.func).partition(".")
    if module != "os" or name not in PATH_CALLS:
        return False
    return not {"dir_fd", "src_dir_fd"} & {each.arg for each in call.keywords}


def functions_of(tree: ast.Module) -> Iterator[tuple[ast.AST, str]]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node, node.name
        elif isinstance(node, ast.ClassDef):
            for each in node.body:
                if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
                    yield each, f"{node.name}.{each.name}"
