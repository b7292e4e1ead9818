"""Transcripts of commands: files in ``golden`` that say what is run, and what it prints.

A line that begins with ``$ `` is run: ``kvtier``, with what it reads from its standard input after
``<<<``, or a step of the test's by its words. What it printed follows, and its exit status. Words
in capitals stand for places, and in what is given for parts of configurations too. JSON has a line
for each of its keys here.
``WRITE_GOLDEN=1 pytest tests/unit/tools`` runs the lines of each file and writes it again.
"""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from kvtier.tools.cli.main import main

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import pytest

GOLDEN = Path(__file__).parent / "golden"

# What differs from run to run, or from machine to machine, but is not what a command says.
_CHANGING = (
    (re.compile(r"(?<![\w.])[\d.,]+ (s|min|h|d)(?!\w)"), "AGE"),
    (re.compile(r'("\w*(?:oldest|newest|made)_s": )(?!1000)\d+'), r"\1TIME"),
    (re.compile(r"(process |engine_pid\": )\d+"), r"\1PID"),
    (re.compile(r"127\.0\.0\.1:\d{2,}"), "HOST"),
    (re.compile(r"(?<=\S)  +"), "  "),
    (re.compile(r"─+"), "─"),
    (re.compile(r"^( (?:lru|arc|MIN)  .*  )[\d.]+ *$", re.MULTILINE), r"\1SECONDS"),
    (re.compile(r"(size on disk  )[\d.]+ \w+|(bytes_on_disk\": )[\d.]+"), r"\1\2BYTES"),
    (re.compile(r"\d+ (bytes of memory that there are)"), r"BYTES \1"),
    (re.compile(r"(on this host, )[\d.]+ \w+(?=: an)"), r"\1BYTES"),
    (re.compile(r"(?:[\d.]+ \w+ of )?[\d.]+ \w+ (?:are )?free"), "BYTES free"),
    (re.compile(r'("seconds": )[\d.e-]+'), r"\1SECONDS"),
    (re.compile(r"(Types that can be listed: |is not installed. Known: disk)[\w, ]+"), r"\1TYPES"),
    (re.compile(r"(Known keys: )[\w, ]+"), r"\1KEYS"),
    (re.compile(r" +$", re.MULTILINE), ""),
)


class Transcript:
    """Plays transcripts, with ``places`` by the names that stand for them there, and ``parts``."""

    def __init__(
        self,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
        places: Mapping[str, str],
        parts: Mapping[str, str],
    ) -> None:
        self._capsys = capsys
        self._monkeypatch = monkeypatch
        self._places = places
        self._parts = parts

    def play(self, name: str, **steps: Callable[[], object]) -> None:
        """Run each line of a file, and compare what is printed. A step may return what it saw."""
        path = GOLDEN / f"{name}.txt"
        lines = re.findall(r"^\$ (.+)$", path.read_text(), re.MULTILINE)
        self._capsys.readouterr()
        found = "\n".join(self._entry(line, steps) for line in lines)
        if os.environ.get("WRITE_GOLDEN"):
            path.write_text(found)
        assert found == path.read_text()

    def _entry(self, line: str, steps: Mapping[str, Callable[[], object]]) -> str:
        if not line.startswith("kvtier "):
            seen = steps[line.replace(" ", "_")]()
            self._capsys.readouterr()
            return f"$ {line}\n" + ("" if seen is None else self._masked(_lines(f"{seen}")))
        words = [self._filled_in(word) for word in shlex.split(line)[1:]]
        if "<<<" in words:
            *words, _, text = words
            raw = io.TextIOWrapper(io.BytesIO(text.encode(errors="surrogateescape")))
            self._monkeypatch.setattr(sys, "stdin", raw)
        status = main(words)
        printed = self._capsys.readouterr()
        return f"$ {line}\n{self._masked(_lines(printed.out) + printed.err)}[{status}]\n"

    def _filled_in(self, word: str) -> str:
        for name, text in {**self._parts, **self._places}.items():
            word = re.sub(rf"\b{name}\b", text.replace("\\", r"\\"), word)
        return word

    def _masked(self, text: str) -> str:
        for name, place in self._places.items():
            text = text.replace(place, name)
        for pattern, instead in _CHANGING:
            text = pattern.sub(instead, text)
        return text


def _lines(text: str) -> str:
    """Return what was printed; of JSON, a line for each key."""
    if not text.startswith("{"):
        return text if text.endswith("\n") or not text else f"{text}\n"
    values = json.loads(text)
    return "".join(f"{json.dumps(key)}: {json.dumps(value)}\n" for key, value in values.items())
