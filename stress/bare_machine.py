"""The README's commands on a machine that has nothing: a new root with Debian's packages only.

    python -m stress.bare_machine                              # as root, then as an ordinary user
    python -m stress.bare_machine --python ~/python-3.12       # with a Python of yours
    python -m stress.bare_machine --command "make dev lint unit"
    python -m stress.bare_machine --dockerfile                 # what building the image does

Each run has a root of its own, made by debootstrap (apt-get install debootstrap; needs root), with
Python, its venv, make and git, and a clean clone of this repository's HEAD. Of this machine it has
the kernel, the network, and how pip gets its packages. Prints how long each command took and what
it left out; exits with 1 if one failed.

``--dockerfile`` runs the lines of ``docs/deploy/Dockerfile`` in such a root, without the vLLM of
its base, and then kvtier as a user without a name.
"""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from stress.pods import dockerfile
from stress.supervisor import folder_prefix, supervised

if TYPE_CHECKING:
    from collections.abc import Sequence

REPOSITORY: Final = Path(__file__).parents[1]
PACKAGES: Final = "python3,python3-venv,make,git,ca-certificates"
COMMANDS: Final = ("make demo", "make test")
USER: Final = "somebody"
VENV: Final = (
    "/image/python"  #: in place of the image's Python: Debian's takes no packages from pip
)
CONFIGURATION: Final = (
    '{"spec_name": "KVTierOffloadingSpec", "spec_module_path": "kvtier.vllm", '
    '"cpu_bytes_to_use": "1MiB"}'
)
IN_IMAGE: Final = f"""set -e; export PATH={VENV}/bin:$PATH
test ! -e /kvtier
cd /
python3 -m pip check
echo '{CONFIGURATION}' | setpriv --reuid=1000680000 --regid=0 --clear-groups --no-new-privs \
    env HOME=/nonexistent kvtier check -
"""
TAIL_LINES: Final = 40


class Machine(NamedTuple):
    """Who runs the commands, and with which Python: of Debian, or below a folder of the host."""

    user: str
    python: Path | None

    def __str__(self) -> str:
        return f"{self.user}, Python {self.python.name if self.python else 'of Debian'}"


def make_base(folder: Path, suite: str) -> Path:
    """Install Debian's packages once, for all runs."""
    base = folder / "base"
    command = ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", suite, str(base)]
    with (folder / "debootstrap.log").open("w") as log:
        subprocess.run(command, stdout=log, stderr=log, check=True)
    shutil.copyfile("/etc/resolv.conf", base / "etc/resolv.conf")
    (base / "etc/hosts").write_text("127.0.0.1 localhost\n::1 localhost\n")
    (base / "root").chmod(0o755)  # a Python may lie there, for all
    subprocess.run(["chroot", base, "useradd", "--create-home", USER], check=True)
    return base


def take_over_pip(base: Path) -> list[Path]:
    """Configure pip as it is here; returns the files and folders that this names."""
    said = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    ).stdout
    settings = dict(re.findall(r"^\S+\.([\w-]+)='(.*)'$", said, re.MULTILINE))
    lines = [f"{name} = {value}" for name, value in settings.items()]
    (base / "etc/pip.conf").write_text("\n".join(["[global]", *lines, ""]))
    words = " ".join(settings.values()).split()
    # The files of an index in a folder lie beside it.
    named = [Path(word.removeprefix("file://")) for word in words]
    named = [path.parent if f"file://{path}" in words else path for path in named]
    return [path for path in named if path.is_absolute() and path.exists()]


def mounts(root: Path, of_the_host: Sequence[Path]) -> list[str]:
    """Return the commands that mount what the root has of this machine."""
    lines = ["mount --make-rprivate /", f"mount --bind {root} {root}"]
    lines.append(f"mount -t proc proc {root}/proc")
    lines += [f"mount --rbind /{name} {root}/{name}" for name in ("sys", "dev")]
    lines.append(f"mount -t tmpfs -o mode=1777 tmpfs {root}/dev/shm")
    for source in of_the_host:
        target = root / source.relative_to("/")
        folder = target if source.is_dir() else target.parent
        lines += [f"mkdir -p {folder}", f"touch {target}", f"mount --bind {source} {target}"]
    return lines


def run(
    root: Path, machine: Machine, of_the_host: Sequence[Path], commands: Sequence[str], log: Path
) -> list[tuple[str, int, float]]:
    """Run the commands in the root; returns each one's exit status and seconds."""
    home = root / ("root" if machine.user == "root" else f"home/{machine.user}")
    clone = home / "kvtier"
    subprocess.run(["git", "clone", "-q", "--no-hardlinks", REPOSITORY, clone], check=True)
    subprocess.run(
        ["chroot", root, "chown", "-R", f"{machine.user}:", f"/{clone.relative_to(root)}"],
        check=True,
    )
    path = "/usr/local/bin:/usr/bin:/bin" + (":/usr/sbin:/sbin" if machine.user == "root" else "")
    environment = {"HOME": f"/{home.relative_to(root)}", "PATH": path}
    make = f" PYTHON={machine.python}/bin/python3" if machine.python else ""
    done = []
    for command in commands:
        inside = f"cd kvtier && {command.replace('make ', f'make{make} ', 1)}"
        as_user = ["chroot", f"--userspec={machine.user}", f"{root}", "env", "-i"]
        as_user += [f"{name}={value}" for name, value in environment.items()]
        as_user += ["bash", "-c", f"cd && {inside}"]
        script = "\n".join(["set -e", *mounts(root, of_the_host), f"exec {shlex.join(as_user)}"])
        began_s = time.monotonic()
        with log.open("a") as said:
            ended = subprocess.run(
                ["unshare", "--mount", "--pid", "--fork", "--kill-child", "bash", "-c", script],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                check=False,
            )
        done.append((command, ended.returncode, time.monotonic() - began_s))
        if ended.returncode:
            break
    return done


def main() -> int:
    """Run the commands on each machine."""
    parser = argparse.ArgumentParser("python -m stress.bare_machine", description=__doc__)
    parser.add_argument("--command", action="append", help="in place of the README's two")
    parser.add_argument(
        "--python",
        type=Path,
        action="append",
        default=[],
        help="a Python's folder, in place of Debian's",
    )
    parser.add_argument("--user", action="append", choices=("root", USER), help="only this one")
    parser.add_argument(
        "--dockerfile", action="store_true", help="as root, what building the image does"
    )
    parser.add_argument("--suite", default="bookworm", help="Debian's release")
    parser.add_argument("--logs", type=Path, default=Path("build/bare-machine"))
    given = parser.parse_args()
    if shutil.which("debootstrap") is None:
        parser.error("needs debootstrap: apt-get install debootstrap")
    given.logs.mkdir(parents=True, exist_ok=True)
    commands = given.command or COMMANDS
    if given.dockerfile:
        build = f"set -e; python3 -m venv {VENV}; PATH={VENV}/bin:$PATH\n"
        build += dockerfile.read().script()
        commands, given.user = (build, IN_IMAGE), ["root"]
    machines = [
        Machine(user, python)
        for python in given.python or [None]
        for user in given.user or ("root", USER)
    ]
    with tempfile.TemporaryDirectory(prefix=folder_prefix()) as name:
        folder = Path(name).resolve()
        base, root = make_base(folder, given.suite), folder / "root"
        of_the_host = [*take_over_pip(base), *given.python]
        failed = 0
        for machine in machines:
            subprocess.run(["cp", "-a", base, root], check=True)
            log = given.logs / f"{machine}.log".replace(" ", "-")
            log.unlink(missing_ok=True)
            done = run(root, machine, of_the_host, commands, log)
            failed += show(machine, done, log)
            shutil.rmtree(root)
    return min(failed, 1)


def show(machine: Machine, done: list[tuple[str, int, float]], log: Path) -> bool:
    """Print how it went, and what was left out or how it failed. Returns whether it failed."""
    for command, status, seconds in done:
        shown = command.partition("\n")[0]
        print(f"{machine}: {shown}: status {status} after {seconds:.0f} s")
    failed = bool(done[-1][1])
    lines = log.read_text(errors="replace").splitlines()
    table = next((at for at, line in enumerate(lines) if "== left out" in line), len(lines))
    print("\n".join(lines[-TAIL_LINES if failed else table :]), flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(supervised(main))
