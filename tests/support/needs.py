"""What tests need of the machine beside Python's packages.

A test that needs something is marked with ``needs``, or calls ``require``: where the machine lacks
it, the test is skipped with a reason that says what to do. In CI that fails it
(``tests/conftest.py``); elsewhere ``make test`` ends with a table of what was left out
(``tests/support/gate.py``).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import cache
from typing import TYPE_CHECKING, Final

import pytest

from requirements.debian import packages
from requirements.libraries import NEEDED, missing
from stress.control_group import memory_group
from stress.filesystem.fuse_folder import why_no_fuse

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT: Final = "run as root"
PRIVILEGED: Final = "run as root; in a container, with the capability SYS_ADMIN"
GROUP_LIMIT_BYTES: Final = 512 << 20


def needs(*names: str) -> pytest.MarkDecorator:
    """Mark a test, or a module, that needs all of these: names of ``NEEDS``."""
    reasons = [reason for name in names if (reason := lacking(name))]
    return pytest.mark.skipif(bool(reasons), reason="; ".join(reasons) or "nothing is missing")


def require(name: str) -> None:
    """Skip the test that runs, or the module that is imported, where the machine lacks this."""
    if reason := lacking(name):
        pytest.skip(reason, allow_module_level=True)


@cache
def lacking(name: str) -> str:
    """Return what to do so that the machine has it, as a skip's reason; empty if it has."""
    what, remedy = NEEDS[name]
    done = remedy()
    return done and f"needs {what}: {done}"


def _install(*names: str) -> Callable[[], str]:
    def remedy() -> str:
        lacks = [each.name for each in packages() if each.name in names and each.is_missing()]
        return f"apt-get install {' '.join(lacks)}, as root" if lacks else ""

    return remedy


def _run(*command: str) -> bool:
    if shutil.which(command[0]) is None:
        return False
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _root() -> str:
    return "" if os.geteuid() == 0 else ROOT


def _mounts() -> str:
    """Mount something for real: root may not, in most containers."""
    return "" if _run("unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt") else PRIVILEGED


def _fuse() -> str:
    return why_no_fuse() or _mounts()


def _libraries() -> str:
    packages = " ".join(sorted(NEEDED[name] for name in missing()))
    return packages and f"apt-get install {packages}, as root, or make .venv/.full"


def _object_stores() -> str:
    """Have NIXL load its plugin: its package for CUDA 13 wants a library that none brings."""
    load = (
        "import ctypes, pathlib, nixl; library = pathlib.Path(nixl._bindings.__file__).parent; "
        "ctypes.CDLL(library.parent / f'.{library.name}.mesonpy.libs/plugins/libplugin_OBJ.so')"
    )
    return "" if _run(sys.executable, "-c", load) else "install NVIDIA's libcuobjclient.so.1"


def _namespaces() -> str:
    if missing := _install("nftables")():
        return missing
    return "" if _run("unshare", "--net", "nft", "list", "ruleset") else PRIVILEGED


def _groups() -> str:
    with memory_group(GROUP_LIMIT_BYTES) as folder:
        return "" if folder else f"{ROOT}, where /sys/fs/cgroup is writable"


NEEDS: Final[dict[str, tuple[str, Callable[[], str]]]] = {
    "root": ("root's rights", _root),
    "mount": ("to mount filesystems", _mounts),
    "fuse": ("FUSE", _fuse),
    "network namespace": ("network namespaces and nft", _namespaces),
    "control group": ("control groups", _groups),
    "curl": ("curl", _install("curl")),
    "redis": ("a Redis server", _install("redis-server")),
    "object stores of NIXL": ("NIXL's plugin for object stores", _object_stores),
    # Not in the list of ``make test``: Debian's package starts a service, for one test.
    "prometheus": ("Prometheus", lambda: "" if shutil.which("prometheus") else "install it"),
    "mooncake": ("the libraries of Mooncake's client", _libraries),
}
