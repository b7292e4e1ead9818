"""Get vLLM's own tests of its offloading, from its source distribution.

    python -m tests.vllm.vllms_tests.fetch requirements/engine-cpu.txt FOLDER

``FOLDER`` gets them as their own package, ``v1/kv_offload`` of its tests. Nothing of them is part
of this repository. The release is that of the list of requirements. Options for pip are taken
from ``PIP_ARGS``.
"""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
from pathlib import Path

from tests.vllm.support.other_release import unpack

TESTS = Path("tests/v1/kv_offload")


def main() -> None:
    """Make the folder. Exits with a text that says what is missing."""
    requirements, folder = Path(sys.argv[1]), Path(sys.argv[2])
    (version,) = re.findall(r"^vllm(?:-cpu)?==(\S+)", requirements.read_text(), re.MULTILINE)
    shutil.rmtree(folder, ignore_errors=True)  # of a version before
    with tempfile.TemporaryDirectory(prefix="kvtier-vllm-") as temporary:
        source = unpack(f"vllm=={version}", Path(temporary))
        shutil.copytree(source / TESTS, folder / TESTS)
        for package in TESTS.parents[:-1]:  # not their conftest.py, which wants much more
            shutil.copy(source / package / "__init__.py", folder / package)


if __name__ == "__main__":
    main()
