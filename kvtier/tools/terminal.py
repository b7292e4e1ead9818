"""Output of all commands: tables on stdout, progress on stderr, JSON files written whole.

On a terminal, progress is a bar that disappears. Elsewhere it is not shown, so that a log, or the
mail of a cron job, has only the result.
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvtier.errors import Misuse
from kvtier.plugin_api.atomic_file import is_special, write_named

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID
    from rich.table import Table

    from kvtier.plugin_api.progress import Progress

PLAIN_WIDTH_COLUMNS: Final = 200  #: of a table in a file or a pipe, at most
BAR_UPDATE_EVERY_S: Final = 0.1


def table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[object]],
    *,
    is_dense: bool = False,
) -> None:
    """Print a table on stdout."""
    _console(sys.stdout).print(made_table(title, columns, rows, is_dense=is_dense))


def made_table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[object]],
    *,
    is_dense: bool = False,
) -> Table:
    """Return a table for rich. The first column is text; the others are right-aligned.

    ``is_dense``: one space between columns, instead of two, for tables with many; on a narrow
    terminal the last ones are left out, where figures would be cut.
    """
    from rich import box  # noqa: PLC0415 - as in _console
    from rich.table import Table  # noqa: PLC0415 - as in _console
    from rich.text import Text  # noqa: PLC0415 - as in _console

    class Fitting(Table):
        def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
            left_out: list[str] = []
            wide = options.update(max_width=PLAIN_WIDTH_COLUMNS)
            while (
                self.__rich_measure__(console, wide).maximum > options.max_width
                and len(self.columns) > 1
            ):
                left_out.insert(0, str(self.columns.pop().header))
            yield from super().__rich_console__(console, options)
            if left_out:
                yield Text(f"Too narrow for: {', '.join(left_out)}")

    shown = (Fitting if is_dense else Table)(
        title=Text(title) if title else None,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 0 if is_dense else 1),
        show_header=any(columns),
    )
    for index, column in enumerate(columns):
        shown.add_column(Text(column), justify="right" if index else "left", no_wrap=index > 0)
    for row in rows:
        shown.add_row(*(Text(str(cell)) for cell in row))
    return shown


@contextmanager
def progress(label: str, total: int | None) -> Iterator[Progress]:
    """Show progress until the block ends. ``total`` None: not known."""
    if not sys.stderr.isatty():
        yield _NoProgress()
        return
    console = _console(sys.stderr)
    from rich import progress as rich_progress  # noqa: PLC0415 - as in _console

    with rich_progress.Progress(
        rich_progress.TextColumn("{task.description}", markup=False),
        rich_progress.BarColumn(),
        rich_progress.TaskProgressColumn(),
        rich_progress.TimeElapsedColumn(),
        rich_progress.TextColumn("left:"),
        rich_progress.TimeRemainingColumn(),
        console=console,
        transient=True,
    ) as bar:
        yield _BarProgress(bar, bar.add_task(label, total=total))


def check_can_report(json_file: str | None, *read: str) -> None:
    """Do as ``check_can_write`` for the file of ``--json``; ``-`` is stdout."""
    if json_file and json_file != "-":
        check_can_write(json_file, *read)


def report(
    json_file: str | None,
    figures: dict[str, Any],
    show: Callable[[], None],
    *,
    in_one_line: bool = False,
) -> None:
    """Print figures for readers, or write them to the file of ``--json``; for a file, both.

    ``in_one_line``: on stdout, for a command that prints figures repeatedly.
    """
    if json_file == "-":
        print(json.dumps(figures, indent=None if in_one_line else 2, allow_nan=False), flush=True)
        return
    show()
    if json_file:
        write_json(json_file, figures)
        print(f"Figures: {json_file}")


def check_can_write(path: str | Path, *read: str | None) -> None:
    """Raise ``Misuse`` if no file can be made at ``path``, before the work rather than after.

    ``read``: the files that the command reads, which it must not replace.
    """
    if str(path) == "-":
        raise Misuse("- is no file here. Name one, such as report.json.")
    if is_special(path):
        return
    folder = Path(path).resolve().parent
    if any(file and Path(file).resolve() == Path(path).resolve() for file in read):
        raise Misuse(f"{path} is read, and would be replaced. Name another file.")
    if Path(path).is_dir():
        raise Misuse(f"{path} is a folder. Name a file.")
    if not folder.is_dir():
        raise Misuse(f"{path}: there is no folder {folder}. Make it first.")
    if not os.access(folder, os.W_OK):
        raise Misuse(f"{path}: the folder {folder} may not be written to.")


def write_json(path: str | Path, data: Any) -> None:  # noqa: ANN401 - whatever JSON can hold
    """Write ``data`` to ``path``: whole, or not at all. Leaves no other file behind."""
    text = json.dumps(data, indent=2, allow_nan=False) + "\n"
    write_named(path, lambda place: place.write_text(text, encoding="utf-8"))


def _console(stream: Any) -> Console:  # noqa: ANN401 - a text stream
    from rich.console import Console  # noqa: PLC0415 - slow to import

    class Plain(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # as print does; rich's own handling would exit with status 1

    width = None if stream.isatty() else PLAIN_WIDTH_COLUMNS
    return Plain(file=stream, width=width, highlight=False)


class _BarProgress:
    """A bar, drawn at most ten times a second."""

    def __init__(self, bar: RichProgress, task: TaskID) -> None:
        self._bar = bar
        self._task = task
        self._waiting = 0
        self._next_update = 0.0

    def advance(self, count: int = 1) -> None:
        """See ``Progress.advance``."""
        self._waiting += count
        now = time.monotonic()
        if now >= self._next_update:
            self._bar.advance(self._task, self._waiting)
            self._waiting = 0
            self._next_update = now + BAR_UPDATE_EVERY_S


class _NoProgress:
    """Shows nothing."""

    def advance(self, count: int = 1) -> None:
        """See ``Progress.advance``."""


def says_yes(question: str) -> bool:
    """Ask on stderr, and read the answer from stdin."""
    print(question, end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")
