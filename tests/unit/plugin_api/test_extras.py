"""What is told to people who lack a library works where kvtier came from a wheel, too."""

from __future__ import annotations

import importlib.metadata
import shlex
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.requirements import Requirement

from kvtier.plugin_api.extras import install

if TYPE_CHECKING:
    import pytest

ROOT = Path(__file__).parents[3]


def test_what_an_extra_brings_is_named_by_its_own_names() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extra, wanted in project["optional-dependencies"].items():
        named = shlex.split(install(extra))[2:]
        assert [*map(Requirement, named)] == [*map(Requirement, wanted)]


def test_a_clone_that_was_never_installed_has_its_extra_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def none(name: str) -> list[str]:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", none)
    assert install("redis") == "the extra redis, in kvtier's clone"
