"""The image: of a tested vLLM, and what it copies of a clone is all of kvtier.

``python -m stress.bare_machine --dockerfile`` runs its lines.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvtier.settings.vllm_releases import is_tested
from stress.pods import dockerfile

if TYPE_CHECKING:
    from collections.abc import Iterable

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = {"kvtier": ROOT / "kvtier", "kvtier_backends": ROOT / "backends/kvtier_backends"}


def test_the_base_is_a_tested_release_of_vllm() -> None:
    name, _, tag = dockerfile.read().base.partition(":")
    assert name == "vllm/vllm-openai"
    assert is_tested(tag.removeprefix("v"))


def test_the_extras_are_kvtiers() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = dockerfile.read().arguments["EXTRAS"].split(",")
    assert set(extras) <= project["optional-dependencies"].keys()


def test_an_unknown_line_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "Dockerfile"
    file.write_text("FROM scratch\nVOLUME /kv\n")
    monkeypatch.setattr(dockerfile, "FILE", file)
    with pytest.raises(ValueError, match="VOLUME"):
        dockerfile.read()


def test_what_is_copied_makes_all_of_kvtier(tmp_path: Path) -> None:
    """A file that the build needs and that is not copied would fail it, or leave out a package."""
    for sources, target in dockerfile.read().copied:
        for source in sources:
            copy(ROOT / source, tmp_path / "clone" / Path(target).relative_to("/kvtier"))
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation",
         "--no-index", "-w", str(tmp_path), str(tmp_path / "clone")],
        check=True,
    )  # fmt: skip
    (wheel,) = tmp_path.glob("*.whl")
    names = {each for each in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in each}
    assert names == set(modules())


def copy(source: Path, target: Path) -> None:
    """Copy as ``COPY`` does, without what Python has compiled."""
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        target.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, target)


def modules() -> Iterable[str]:
    """Return the names of kvtier's files in a wheel."""
    for package, folder in PACKAGES.items():
        for path in folder.rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                yield f"{package}/{path.relative_to(folder).as_posix()}"
