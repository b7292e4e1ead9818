"""What is built of a clone, and how it is installed where there is none.

The only tests that reach the index of packages, as setting up the clone does: pip itself resolves
what a wheel requires, and nothing is pinned.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_string
from pathlib import Path
from typing import Final

import pytest

from kvtier import __version__

ROOT: Final = Path(__file__).parents[2]
SHIPPED: Final = {"kvtier", "kvtier_backends", f"kvtier-{__version__}.dist-info"}
BUILD: Final = "from setuptools import build_meta; print(build_meta.build_{}('{}'))"
PIP: Final = ("-m", "pip", "--disable-pip-version-check", "install", "-qq", "--no-input")
CONFIG: Final = """{
    "cpu_bytes_to_use": "1GiB",
    "spec_name": "KVTierOffloadingSpec",
    "spec_module_path": "kvtier.vllm",
    "secondary_tiers": [{"type": "memory", "capacity_bytes": "1GiB"}]
}"""
USED: Final = """
from kvtier import Namespace, RuntimeConfig, SlotMemory, open_runtime

tiers = [{"type": "memory", "capacity_bytes": 1 << 20}]
config = RuntimeConfig.from_mapping({"secondary_tiers": tiers}, slot_count=4, block_bytes=4096)
facade = open_runtime(config, SlotMemory.anonymous(4, 4096), Namespace({"model": "m"}))
facade.on_request_started("r")
grant = facade.prepare_store([b"key"], "r")
facade.complete_store(grant.keys, "r")
assert facade.lookup(b"key", "r")
assert facade.close()
"""


def run(*words: str | Path, cwd: Path) -> str:
    """Run a program with nothing of this environment; return what it prints."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    done = subprocess.run(
        words, cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def built(kind: str, source: Path, folder: Path) -> Path:
    return folder / run(sys.executable, "-c", BUILD.format(kind, folder), cwd=source).split()[-1]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the source distribution of the files that git has, none of which is touched."""
    folder = tmp_path_factory.mktemp("sdist")
    clone = folder / "clone"
    tracked = run("git", "ls-files", "-z", "kvtier", "backends", "tests", cwd=ROOT).split("\0")
    for name in (*filter(None, tracked), "pyproject.toml", "README.md", "LICENSE"):
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, clone / name)
    return built("sdist", clone, folder)


@pytest.fixture(scope="module")
def wheel(sdist: Path) -> Path:
    """Return the wheel that is built of the source distribution, as an index's users may do."""
    with tarfile.open(sdist) as archive:
        archive.extractall(sdist.parent, filter="data")
    return built("wheel", sdist.parent / sdist.name.removesuffix(".tar.gz"), sdist.parent)


def test_the_wheel_has_all_that_runs_and_no_tests(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {Path(name).parts[0] for name in names} == SHIPPED
    listed = run("git", "ls-files", "kvtier", "backends/kvtier_backends", cwd=ROOT).split()
    wanted = {name.removeprefix("backends/") for name in listed}
    assert wanted == {name for name in names if not name.startswith("kvtier-")}


def test_the_wheel_says_what_it_is(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    metadata = message_from_string(
        archive.read(f"kvtier-{__version__}.dist-info/METADATA").decode()
    )
    assert metadata["Version"] == __version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata.get_payload() == (ROOT / "README.md").read_text()


def install(python: str | Path, wheel: Path, folder: Path, *extras: str) -> Path:
    """Return the programs of a new environment that has the wheel, and nothing else of ours."""
    run(python, "-m", "venv", folder / "venv", cwd=folder)
    programs = folder / "venv/bin"
    wanted = f"{wheel}[{','.join(extras)}]" if extras else str(wheel)
    options = shlex.split(os.environ.get("PIP_ARGS", ""))
    run(programs / "python", *PIP, *options, wanted, cwd=folder)
    return programs


def check_it_works(programs: Path, folder: Path) -> None:
    (folder / "kv.json").write_text(CONFIG)
    assert __version__ in run(programs / "kvtier", "--version", cwd=folder)
    run(programs / "kvtier", "check", "kv.json", "--block-bytes", "64KiB", cwd=folder)
    run(programs / "python", "-c", USED, cwd=folder)


def test_it_works_where_only_the_wheel_is_installed(wheel: Path, tmp_path: Path) -> None:
    check_it_works(install(sys.executable, wheel, tmp_path), tmp_path)


@pytest.mark.long  # 200 MB, and Pythons that few machines have
@pytest.mark.parametrize("python", ["python3.11", "python3.12", "python3.13"])
def test_all_extras_are_installed_by_pip_alone(python: str, wheel: Path, tmp_path: Path) -> None:
    found = shutil.which(python)
    if found is None or subprocess.run([found, "-c", ""], check=False).returncode:
        pytest.skip(f"needs {python}: install it")
    programs = install(found, wheel, tmp_path, "all")
    check_it_works(programs, tmp_path)
    run(programs / "python", "-m", "pip", "check", cwd=tmp_path)
    run(programs / "python", "-c", "import cryptography, obstore, valkey, zstandard", cwd=tmp_path)
