"""Imports the scripts and hooks of ``docs``, which is no package."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from types import ModuleType

DOCS: Final = Path(__file__).parents[2] / "docs"


def docs_script(name: str) -> ModuleType:
    """Return a script as a module, a new one each time; ``name``: without ``.py``."""
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
