"""Lay out a vLLM that is one release further: 0.33 with the changes that its main branch discusses.

    python tests/vllm/support/next_release.py .venv/vllm-0.33 FOLDER
    PYTHONPATH=FOLDER python -m kvtier.vllm.relied_on

What kvtier does with it is in docs/explanation/how-kvtier-follows-vllm.md.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

VERSION = "0.34.0"
TIERING = "vllm/v1/kv_offload/tiering/spec.py"
BASE = "vllm/v1/kv_offload/base.py"

CHANGES = (
    ("vllm/_version.py", "0.33.0", VERSION),
    # A worker removes the name of the shared memory once all have mapped it (vllm#57313).
    (
        TIERING,
        "        try:\n            if self.config.canonical_layout:",
        (
            "        import os\n        os.unlink(worker_mmap.mmap_path)\n"
            "        try:\n            if self.config.canonical_layout:"
        ),
    ),
    # A key that chooses what tiers are given (vllm#51240).
    (
        TIERING,
        "        worker_mmap = SharedOffloadRegion(",
        (
            '        self.extra_config.get("admission_policy")\n'
            "        worker_mmap = SharedOffloadRegion("
        ),
    ),
    # Slots of one group each, whose size is a further field (vllm#56953).
    (
        "vllm/v1/kv_offload/config.py",
        "class OffloadingGroupConfig:",
        "class OffloadingGroupConfig:\n    kv_bytes_per_chunk = 0",
    ),
    # A method that kvtier overrides, under another name: no known change.
    (BASE, "def take_events(self)", "def drain_events(self)"),
)


def main() -> None:
    """Make the folder out of hard links, with copies of what is changed."""
    source, folder = Path(sys.argv[1]), Path(sys.argv[2])
    shutil.copytree(source, folder, copy_function=lambda old, new: Path(new).hardlink_to(old))
    for name, before, after in CHANGES:
        text = (folder / name).read_text()
        if before not in text:
            sys.exit(f"{name} has no {before!r}: look at what became of it")
        (folder / name).unlink()
        (folder / name).write_text(text.replace(before, after, 1))
    for info in folder.glob("vllm-0.33*.dist-info"):
        info.rename(folder / info.name.replace("0.33.0", VERSION))


if __name__ == "__main__":
    main()
