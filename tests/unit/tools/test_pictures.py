"""What pictures promise: each can be drawn, of nothing too, and is left whole or not at all."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, strategies

from kvtier.errors import Misuse
from kvtier.tools.replay import pictures
from kvtier.tools.replay.curves import MIN, CurvePoint
from kvtier.tools.replay.pictures import (
    PicturesMissing,
    check_can_draw,
    draw_curves,
    draw_sizes,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.slow

pytest.importorskip("matplotlib")


def line(name: str, *hits: int) -> list[CurvePoint]:
    return [CurvePoint(name, 10 * 2**index, hit, 100, 0.1) for index, hit in enumerate(hits)]


CURVES = {"lru": line("lru", 5, 20, 30), "arc": line("arc", 5, 22), MIN: line(MIN, 20, 30, 36)}
DRAWN: dict[str, Callable[[Any], None]] = {
    "curves": lambda path: draw_curves(path, "title", CURVES, distinct_blocks=64),
    "curves in bytes": lambda path: draw_curves(
        path, "title", CURVES, distinct_blocks=64, block_bytes=2**26
    ),
    "curves without hits": lambda path: draw_curves(
        path, "title", {"lru": line("lru", 0)}, distinct_blocks=64
    ),
    "sizes": lambda path: draw_sizes(
        path, "title", [(1, 0.1), (10, 0.3)], (1, 0.1), policy="lru", endless=0.3
    ),
    "sizes without a knee": lambda path: draw_sizes(
        path, "title", [(1, 0.0)], None, policy="lru", endless=0.0
    ),
}


@pytest.mark.parametrize("what", DRAWN)
def test_a_picture_is_drawn_without_a_warning(tmp_path: Path, what: str) -> None:
    """Warnings are errors here: of axes without extent, of glyphs that are missing."""
    path = tmp_path / "picture.png"
    DRAWN[what](path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 5000
    assert list(tmp_path.iterdir()) == [path]


def test_an_interrupted_picture_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(type(tmp_path), "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        DRAWN["sizes"](tmp_path / "picture.png")
    assert not list(tmp_path.iterdir())


def test_a_link_is_followed_and_a_pipe_is_written_to(tmp_path: Path) -> None:
    """What is no file must not be replaced by one: it may be a device of the machine's."""
    (tmp_path / "link.png").symlink_to("real.png")
    DRAWN["curves"](tmp_path / "link.png")
    os.mkfifo(tmp_path / "pipe")
    with ThreadPoolExecutor(1) as reader:
        read = reader.submit((tmp_path / "pipe").read_bytes)
        DRAWN["curves"](tmp_path / "pipe")
    assert read.result().startswith(b"\x89PNG")
    assert (tmp_path / "real.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "link.png").is_symlink()
    assert (tmp_path / "pipe").is_fifo()


def test_a_picture_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(Misuse, match=r"picture\.png: cannot be written"):
        DRAWN["sizes"](tmp_path / "absent" / "picture.png")


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(PicturesMissing, match="pip install matplotlib"):
        check_can_draw()


@given(strategies.lists(strategies.floats(0, 1), min_size=1, max_size=12))
def test_labels_keep_their_order_and_their_distance(heights: list[float]) -> None:
    placed = pictures._spread(heights, 0.1)
    order = sorted(range(len(heights)), key=heights.__getitem__)
    in_order = [placed[index] for index in order]
    assert all(b - a >= 0.1 - 1e-9 for a, b in pairwise(in_order))
    if all(b - a >= 0.1 for a, b in pairwise(sorted(heights))):
        assert placed == pytest.approx(heights)
