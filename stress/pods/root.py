"""Makes a pod's root on this machine: namespaces, a read-only root, its volumes, user and memory.

What a cluster has and this has not: a seccomp profile, a network of the pod's own, a disk quota
for ``emptyDir``.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from stress.pods.manifests import quantity

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from stress.pods.manifests import Pod

REPOSITORY: Final = Path(__file__).parents[2]
VENV: Final = "/image/python"
CLONE: Final = "/image/kvtier"
OF_THE_IMAGE: Final = {
    **{path: Path(path) for path in ("/usr", "/etc/ssl", "/etc/ld.so.cache", "/sys")},
    str(Path(sys.base_prefix).resolve()): Path(sys.base_prefix).resolve(),
    VENV: Path(sys.prefix).resolve(),
    CLONE: REPOSITORY,
}
"""What the image has, and what stands for it here: Debian's packages, Python, vLLM and kvtier."""

LINKS: Final = ("/bin", "/sbin", "/lib", "/lib64")
DEVICES: Final = ("null", "zero", "full", "random", "urandom")


@dataclass(frozen=True)
class User:
    """Numbers of a process's user and groups."""

    user: int
    group: int
    fs_group: int

    @classmethod
    def of(cls, pod: Pod) -> User:
        """Return those of the manifest."""
        return cls(pod.user, pod.group, pod.fs_group)


def command_in_root(  # noqa: PLR0913 - a pod's parts
    pod: Pod,
    command: Sequence[str],
    environment: Mapping[str, str],
    volumes: Mapping[str, Path],
    *,
    user: User,
    shared_memory_bytes: int = 0,
    group: Path | None = None,
    model: Path | None = None,
    hosts: Sequence[str] = (),
    scratch: Path,
) -> list[str]:
    """Return the command that runs another as the pod's container.

    ``volumes``: folders of this machine by the names of the pod's. ``group``: a control group.
    ``hosts``: names of services, all of this host.
    ``scratch``: an empty folder, where the root is mounted.
    """
    lines = ["set -e"]
    if group is not None:
        lines.append(f"echo $$ > {group}/cgroup.procs")
    root = scratch.resolve()
    lines += ["mount --make-rprivate /", f"mount -t tmpfs -o mode=755 tmpfs {root}"]
    for place, path in OF_THE_IMAGE.items():
        if not path.exists():  # a bare machine's /etc/ssl
            continue
        lines += _bind(path, f"{root}{place}", is_read_only=True)
    lines += [f"cp -d {link} {root}{link}" for link in LINKS if Path(link).is_symlink()]
    lines += [f"mkdir -p {root}/proc {root}/tmp", f"mount -t proc proc {root}/proc"]
    lines.append(f"echo 'root:x:0:0:root:/root:/bin/sh' > {root}/etc/passwd")
    names = " ".join(["localhost", *hosts])
    lines.append(f"echo '127.0.0.1 {names}' > {root}/etc/hosts")
    for name in DEVICES:
        lines += _bind(Path("/dev", name), f"{root}/dev/{name}", is_read_only=False)
    if model is not None:
        lines += _bind(model, f"{root}/model", is_read_only=True)
    for mount in pod.mounts:
        if mount.volume.get("emptyDir", {}).get("medium") == "Memory":
            size = shared_memory_bytes or quantity(mount.volume["emptyDir"]["sizeLimit"])
            lines.append(f"mkdir -p {root}{mount.path}")
            given = f"size={size},mode=2777,gid={user.fs_group}"
            lines.append(f"mount -t tmpfs -o {given} tmpfs {root}{mount.path}")
        else:
            source = volumes[mount.volume["name"]]
            lines += _bind(source, f"{root}{mount.path}", is_read_only=mount.is_read_only)
    # Its programs, and links to its libraries, have this in them. It may lie in a volume's /tmp.
    venv = OF_THE_IMAGE[VENV]
    make = f"mkdir -p {root}{venv.parent} && ln -sn {VENV} {root}{venv}"
    lines.append(f"[ -e {root}{venv} ] || [ -L {root}{venv} ] || {{ {make}; }}")
    lines.append(f"mount -o remount,ro {root}")
    lines.append(f"exec chroot {root} {shlex.join(as_user(user, environment, command))}")
    options = ["--mount", "--pid", "--ipc", "--fork", "--kill-child"]
    return ["unshare", *options, "bash", "-c", "\n".join(lines)]


def as_user(user: User, environment: Mapping[str, str], command: Sequence[str]) -> list[str]:
    """Return the command that runs another with these numbers, variables and no right beside."""
    return [
        *("setpriv", f"--reuid={user.user}", f"--regid={user.group}", f"--groups={user.fs_group}"),
        *("--bounding-set=-all", "--inh-caps=-all", "--no-new-privs", "env", "-i", "--chdir=/"),
        *(f"{name}={value}" for name, value in environment.items()),
        *command,
    ]


def image_environment() -> dict[str, str]:
    """Return the variables that an image has."""
    return {
        "PATH": f"{VENV}/bin:/usr/local/bin:/usr/bin:/bin",
        "PYTHONPATH": f"{CLONE}:{CLONE}/backends",
        "LD_LIBRARY_PATH": f"{VENV}/libraries",
    }


def path_in_image(path: Path) -> str:
    """Return where a file of this Python's is in the image."""
    return f"{VENV}/{path.resolve().relative_to(OF_THE_IMAGE[VENV])}"


def _bind(source: Path, target: str, *, is_read_only: bool) -> list[str]:
    where, what = shlex.quote(target), shlex.quote(str(source))
    make = f"mkdir -p {where}"
    if not source.is_dir():
        make = f"mkdir -p {shlex.quote(os.path.dirname(target))}; touch {where}"  # noqa: PTH120
    lines = [make, f"mount --rbind {what} {where}"]
    return [*lines, f"mount -o remount,bind,ro {where}"] if is_read_only else lines


def why_not_here() -> str:
    """Return what this machine lacks to run a pod; empty if it can."""
    missing = [name for name in ("unshare", "setpriv", "chroot") if shutil.which(name) is None]
    if missing:
        return f"needs {', '.join(missing)}"
    if os.geteuid():
        return "needs root, which makes the namespaces"
    tried = subprocess.run(
        ["unshare", "--mount", "--pid", "--ipc", "--net", "--fork", "true"],
        capture_output=True,
        check=False,
    )
    return "needs the capability SYS_ADMIN" if tried.returncode else ""
