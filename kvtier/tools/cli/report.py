"""``kvtier report``: draws a record, a replay or a soak as one page."""

from __future__ import annotations

import sys
from typing import Annotated, Literal

from cyclopts import Parameter

from kvtier.errors import Misuse
from kvtier.tools.cli.options import HYPHEN, File


def report(
    file: File,
    /,
    *,
    output: Annotated[File | None, HYPHEN, Parameter(metavar="FILE")] = None,
    on_bad_line: Literal["stop", "skip"] = "stop",
) -> None:
    """Draw a record, a replay or a soak as one self-contained HTML page.

    The page has the main figures at the top, graphs over one time axis, and tables. It goes to
    stdout unless --output is given. The file's type is recognised by its content.

    Parameters
    ----------
    file
        a record (option record; gzip and zstd are recognised), the JSON file of kvtier replay, or
        the report.json of a soak
    output
        write the page to FILE
    on_bad_line
        for a record: what to do with a line that is not a request
    """
    from kvtier.plugin_api.atomic_file import write_named  # noqa: PLC0415 - heavy imports
    from kvtier.tools.cli.trace_input import reading_in_sight  # noqa: PLC0415 - as above
    from kvtier.tools.report.drawing import page_of_file  # noqa: PLC0415 - as above
    from kvtier.tools.terminal import check_can_write  # noqa: PLC0415 - as above

    if output is not None:
        check_can_write(output, file)
    elif sys.stdout.isatty():
        raise Misuse(
            "the page would go to the terminal. Redirect it (> page.html), or give --output FILE."
        )
    with reading_in_sight(f"reading {file}") as on_progress:
        page = page_of_file(file, skips=on_bad_line == "skip", on_progress=on_progress)
    html = page.html().encode(errors="replace")  # file names may not be UTF-8
    if output is not None:
        write_named(output, lambda place: place.write_bytes(html))
        print(f"Page: {output}")
        return
    sys.stdout.buffer.write(html)
