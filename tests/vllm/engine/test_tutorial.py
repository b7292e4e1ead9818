"""The tutorial's script does what the tutorial says, as it is printed.

In `make test`, that it asks vLLM for what ``test_engine_disk.py`` starts: engines that find again
what an engine before them has stored. `make test-long` runs it.

The model is the one that the page has a reader without a GPU write, by the printed command; only
the home is another one.
"""

from __future__ import annotations

import re
import runpy
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from kvtier.settings.extra_config import read_settings
from tests.support.printed import DOCS, printed
from tests.vllm.engine.test_engine_disk import config_of
from tests.vllm.support.children import run_program, start_scenario
from tests.vllm.support.engine import CONNECTOR

if TYPE_CHECKING:
    from pathlib import Path

PAGE = "tutorial.md"
MODEL = 'MODEL = {"model": "Qwen/Qwen2.5-0.5B-Instruct"}\n'


def printed_script() -> str:
    """Return the page's one program."""
    return printed(PAGE, "python")[0]


def printed_document() -> str:
    """Return the text that the script has the model read, once."""
    (text,) = re.findall(r'document = "(.*?)" \* 200', printed_script())
    return str(text)


def printed_for_cpus() -> str:
    """Return the script with the line in it that the page has for machines without a GPU."""
    _, line = printed(PAGE, "python")
    text = printed_script()
    assert text.count(MODEL) == 1
    return text.replace(MODEL, line)


def printed_command(of: str) -> list[str]:
    """Return the arguments of the page's one command that names a module, ``~`` and all."""
    (line,) = re.findall(
        rf"^\$ python (-m {re.escape(of)} .*)$", "".join(printed(PAGE, "console")), re.MULTILINE
    )
    return str(line).split()


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """Return the script as a file, with the model that it names in its home."""
    arguments = [
        each.replace("~", str(tmp_path), 1) for each in printed_command("kvtier.tools.demo")
    ]
    run_program(*arguments, environment=environment_of(tmp_path))
    file = tmp_path / "first.py"
    file.write_text(printed_for_cpus())
    return file


def environment_of(home: Path) -> dict[str, str]:
    """Return what the page has a reader set, and what makes a log that can be read."""
    (gib,) = re.findall(
        r"^\$ export VLLM_CPU_KVCACHE_SPACE=(\d+)$", "".join(printed(PAGE, "console")), re.MULTILINE
    )
    return {
        "HOME": str(home),
        "VLLM_CPU_KVCACHE_SPACE": gib,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_LOGGING_COLOR": "0",
    }


def run(script: Path, home: Path) -> list[str]:
    """Run the script as a reader does; return the lines that it prints."""
    return run_program(script, folder=script.parent, environment=environment_of(home)).splitlines()


def play(script: str) -> None:
    """A scenario: the same in a process that has imported vLLM, half a minute earlier."""
    runpy.run_path(script, run_name="__main__")


def line_with(words: str, lines: list[str]) -> str:
    (found,) = (line for line in lines if words in line)
    return found


# Two runs, of which the first imports vLLM three times.
@pytest.mark.long
@pytest.mark.one_release
def test_the_second_run_finds_the_document_in_the_folder(
    script: Path, tmp_path: Path, log_folder: Path
) -> None:
    """A process of vLLM's reads the script again, too: without its main it would not end."""
    cold = run(script, tmp_path)
    environment = environment_of(tmp_path)
    with start_scenario(play, log_folder, environment, True, script=str(script)) as child:
        child.result()
        warm = child.log().splitlines()
    cached = [int(line) for lines in (cold, warm) for line in lines if line.strip().isdigit()]
    assert cached[0] == 0
    assert cached[1] > 1900, "all of 2,001 tokens but those of the last block"
    for lines, is_empty in ((cold, True), (warm, False)):
        assert "tiers=1:disk" in line_with("kvtier is ready", lines)
        opened = line_with("tier is open", lines)
        assert f"place={tmp_path / 'kv'}" in opened
        assert (" blocks=0 " in opened) is is_empty


class Recorder:
    """In place of ``vllm.LLM``: takes what the script gives it."""

    calls: ClassVar[list[tuple[Any, ...]]] = []

    def __init__(self, model: str, **settings: Any) -> None:
        self.calls.append((model, settings))

    def generate(self, prompt: str, sampling: Any) -> list[Any]:
        self.calls.append((prompt, sampling))
        return [SimpleNamespace(num_cached_tokens=1987)]


def test_the_script_starts_what_the_disk_tiers_engines_are_started_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All but the sizes, the folder and the deadlines, word for word; and vLLM takes it."""
    monkeypatch.setattr(Recorder, "calls", [])
    monkeypatch.setattr("vllm.LLM", Recorder)
    monkeypatch.setenv("HOME", str(tmp_path))
    file = tmp_path / "first.py"
    file.write_text(printed_script())
    play(str(file))
    (model, settings), (prompt, sampling) = Recorder.calls
    assert f'"{model}"' in MODEL
    assert prompt == printed_document() * 200
    assert sampling.max_tokens == 8
    assert capsys.readouterr().out == "1987\n"
    transfer = settings.pop("kv_transfer_config")
    assert settings == {}
    assert {name: getattr(transfer, name) for name in CONNECTOR} == CONNECTOR

    printed = dict(transfer.kv_connector_extra_config)
    tested = config_of(str(tmp_path / "kv"))
    read_settings(printed, slot_count=8, block_bytes=4096)
    (tier,), (tested_tier,) = printed.pop("secondary_tiers"), tested.pop("secondary_tiers")
    assert printed.keys() < tested.keys()
    assert tier.keys() < tested_tier.keys()
    for own, theirs, size in (
        (printed, tested, "cpu_bytes_to_use"),
        (tier, tested_tier, "capacity_bytes"),
    ):
        assert type(own.pop(size)) is type(theirs[size]) is str
        assert own == {key: theirs[key] for key in own}


def test_the_page_shows_the_lines_that_are_written() -> None:
    page = (DOCS / PAGE).read_text()
    assert "kvtier is ready" in page
    assert "tier is open" in page
