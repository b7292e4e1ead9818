"""Shared libraries that wheels need, from other wheels where the system lacks them.

    .venv/bin/python requirements/libraries.py [pip's options]

Where pip finds no CPU build of torch, it takes the one for CUDA, which can't be imported without
CUDA's libraries: they are installed, too. vLLM's CPU build and Mooncake's client are linked against
libraries that a bare machine has not, and that only root can install. NIXL's wheel brings them,
under names of its own: links in ``.venv/libraries`` give them back theirs. The Makefile has that
folder in ``LD_LIBRARY_PATH``.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path
from typing import Final

NEEDED: Final = {
    "libnuma.so.1": "libnuma1",  # vLLM's CPU build and Mooncake; the packages are Debian's
    "libibverbs.so.1": "libibverbs1",  # Mooncake, as the next
    "libcurl.so.4": "libcurl4",
}
LINKS: Final = Path(sys.prefix) / "libraries"
BROUGHT: Final = Path(sysconfig.get_path("purelib")) / "nixl_cu12.libs"
IMPORT_TORCH: Final = [sys.executable, "-c", "import torch"]
LIST: Final = Path(__file__).with_name("engine-tests.txt")


def missing() -> list[str]:
    """Return the libraries that can't be loaded, from wherever."""
    return [name for name in NEEDED if not _loads(name)]


def _loads(name: str) -> bool:
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def link(names: list[str]) -> None:
    """Make the links. What the libraries need themselves is looked for beside them."""
    LINKS.mkdir(exist_ok=True)
    for library in BROUGHT.iterdir():
        stem = library.name.partition(".so")[0].rpartition("-")[0]
        own = [name for name in names if name.startswith(f"{stem}.so")]
        for name in (library.name, *own):
            (LINKS / name).unlink(missing_ok=True)
            (LINKS / name).symlink_to(library)


def install_cuda(options: list[str]) -> int:
    """Install what torch's build for CUDA declares of CUDA; returns pip's exit status."""
    wanted = [each.partition(";")[0] for each in metadata.requires("torch") or ()]
    wanted = [each for each in wanted if each.startswith(("cuda-", "nvidia-"))]
    print(
        "== pip found torch for CUDA only: CUDA's libraries, too (2 GB, some minutes). With the"
        '\n   CPU builds of PyTorch\'s own index, make PIP_ARGS="--extra-index-url ..." needs none',
        flush=True,
    )
    pip = [sys.executable, "-m", "pip", "install", "-qq", "--no-input", "--no-compile"]
    done = subprocess.run(
        [*pip, *options, *wanted],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,  # it laments what torch declares besides, and vLLM turns off
        text=True,
        check=False,
    )
    if done.returncode:
        print(done.stdout, file=sys.stderr)
    return done.returncode


def main(options: list[str]) -> int:
    """Return pip's exit status, or 0."""
    if subprocess.run(IMPORT_TORCH, capture_output=True, check=False).returncode:
        status = install_cuda(options)
        if status:
            return status
    names = missing()
    if not names:
        return 0
    packages = " ".join(NEEDED[name] for name in names)
    print(
        f"== {', '.join(names)}: from NIXL's package, since {packages} is not installed", flush=True
    )
    if not BROUGHT.exists():
        installer = Path(__file__).with_name("install.py")
        status = subprocess.call([sys.executable, installer, *options, "-r", LIST])
        if status:
            return status
    link(names)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
