"""What all commands promise on the terminal: plain text in a pipe, files whole or not at all."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from kvtier.errors import Misuse
from kvtier.tools.terminal import check_can_write, progress, table, write_json


def test_a_table_in_a_pipe_is_plain_text_and_never_cut(capsys: pytest.CaptureFixture[str]) -> None:
    """Brackets are no markup: names of files and policies may have them."""
    wide = "x" * 90
    table("hits [red]", ["policy", "1 %", "2 %"], [["[bold]lru", 0.5, wide], ["arc", 1, 2]])
    out = capsys.readouterr().out
    assert "hits [red]" in out
    assert "[bold]lru" in out
    assert wide in out
    assert "\x1b" not in out


def test_progress_in_a_pipe_is_nothing_at_all(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("playing", 1000) as bar:
        bar.advance(50)
    assert capsys.readouterr() == ("", "")


def test_progress_on_a_terminal_is_a_bar_that_goes_away(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    with progress("playing", 3) as bar:
        for _ in range(3):
            bar.advance()
    err = capsys.readouterr().err
    assert "playing" in err
    assert err.endswith("\x1b[1A\x1b[2K")


def test_json_is_written_whole_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    write_json(path, {"hits": [1, 2]})
    write_json(path, {"hits": [3]})
    assert json.loads(path.read_text()) == {"hits": [3]}
    assert list(tmp_path.iterdir()) == [path]


def test_json_follows_links_and_replaces_nothing_that_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("real")
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    terminal, device = os.openpty()  # whatever goes wrong, nobody needs this one
    for place in (tmp_path / "link", tmp_path / "pipe", Path(os.ttyname(device))):
        check_can_write(place)
        write_json(place, {"hits": [1]})
    assert json.loads(os.read(reader, 1 << 16)) == json.loads((tmp_path / "real").read_text())
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "pipe").is_fifo()
    assert Path(os.ttyname(device)).is_char_device()
    for each in (reader, terminal, device):
        os.close(each)


def test_json_that_fails_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "report.json"
    write_json(path, {"hits": [1]})

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(type(path), "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_json(path, {"hits": [2]})
    assert json.loads(path.read_text()) == {"hits": [1]}
    assert list(tmp_path.iterdir()) == [path]


def test_a_place_that_cannot_be_written_is_refused_before_the_work(tmp_path: Path) -> None:
    check_can_write(tmp_path / "report.json")
    with pytest.raises(Misuse, match="there is no folder"):
        check_can_write(tmp_path / "absent" / "report.json")
    with pytest.raises(Misuse, match="is a folder"):
        check_can_write(tmp_path)
    with pytest.raises(Misuse, match="cannot be written"):
        write_json(tmp_path / "absent" / "report.json", {})
