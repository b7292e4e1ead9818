"""What ``kvtier bench`` refuses before anything is started. Running it: ``tests/vllm``."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvtier.tools.cli.exit_status import BAD_INPUT
from kvtier.tools.cli.main import main


@pytest.mark.parametrize("benchmark", ["ops", "engine"])
def test_without_vllm_it_says_what_to_install(
    benchmark: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    assert main(["bench", benchmark]) == BAD_INPUT
    message = capsys.readouterr().err
    assert "not installed" in message
    assert "pip install 'vllm>=0.32,<0.34'" in message
    assert "pip install --no-deps -r requirements/engine-cpu.txt" in message


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["ops", "--runs", "0"], "--runs 0"),
        (["ops", "--blocks", "-1"], "--blocks -1"),
        (["ops", "--request-blocks", "0"], "--request-blocks 0"),
        (["ops", "--picture", "scale.png"], "--scale"),
        (["ops", "--json", "no/such/folder/report.json"], "no/such/folder"),
        (["engine", "--prompts", "0"], "--prompts 0"),
        (["engine", "--json", "."], "folder"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_bad_options_are_refused_before_the_work(
    options: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *options]) == BAD_INPUT
    assert named in capsys.readouterr().err


def test_declaring_the_command_imports_nothing_heavy() -> None:
    """``kvtier --help`` builds every command's parser."""
    heavy = {"vllm", "torch", "numpy", "rich", "matplotlib"}
    program = f"import sys, kvtier.tools.cli.bench; print(sorted({heavy!r} & sys.modules.keys()))"
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == "[]"
