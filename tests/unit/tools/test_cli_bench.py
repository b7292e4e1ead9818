"""``kvtier bench``: its parser is cheap."""

from __future__ import annotations

import subprocess
import sys


def test_declaring_the_command_imports_nothing_heavy() -> None:
    """``kvtier --help`` builds every command's parser."""
    heavy = {"vllm", "torch", "numpy", "rich", "matplotlib"}
    program = f"import sys, kvtier.tools.cli.bench; print(sorted({heavy!r} & sys.modules.keys()))"
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == "[]"
