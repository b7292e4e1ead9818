"""``kvtier top``: shows the state of running engines and their tiers, repeatedly."""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Annotated, Final

from cyclopts import Parameter

from kvtier.errors import Misuse
from kvtier.tools.cli.status import HERE

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

EVERY_S: Final = 2.0


def top(*urls: Annotated[str, Parameter(metavar="URL")]) -> int:
    """Show the tiers of running engines every two seconds, until Ctrl-C.

    Tokens are those of the last minute and of the last hour, as far as the command has run for that
    long; bytes and seconds of loads are those of the last minute.

    Parameters
    ----------
    urls
        of the engines' servers: host:port, or http://host:port/metrics; by default 127.0.0.1:8000
    """
    from rich.console import Group  # noqa: PLC0415 - heavy imports
    from rich.live import Live  # noqa: PLC0415 - as above
    from rich.text import Text  # noqa: PLC0415 - as above

    from kvtier.tools.terminal import made_table  # noqa: PLC0415 - as above
    from kvtier.tools.watching import shown  # noqa: PLC0415 - as above
    from kvtier.tools.watching.page import page_url  # noqa: PLC0415 - as above
    from kvtier.tools.watching.scrape import scrape  # noqa: PLC0415 - as above
    from kvtier.tools.watching.window import Window  # noqa: PLC0415 - as above

    if not sys.stdout.isatty():
        raise Misuse("top draws on a terminal, and stdout is none. Use kvtier status.")
    pages = [page_url(each) for each in urls or (HERE,)]
    hours: defaultdict[str, Window] = defaultdict(lambda: Window(3600.0, apart_s=30.0))
    minutes: defaultdict[str, Window] = defaultdict(lambda: Window(60.0))
    with Live(screen=True, auto_refresh=False) as live:
        while True:
            found = scrape(pages)
            parts: list[Table | Text] = []
            for engine in found.engines:
                hour = hours[engine.name].add(engine)
                minute = minutes[engine.name].add(engine)
                columns, rows = shown.table_of(engine, [("1 h", hour), ("1 min", minute)])
                parts += [Text(shown.headline(engine))]
                parts += [made_table("", columns, rows, is_dense=True)]
                parts += map(Text, [*shown.faults_of(engine), shown.advice(engine), ""])
            parts += [Text(f"{url}: {why}") for url, why in found.silent.items()]
            live.update(Group(*parts), refresh=True)
            time.sleep(EVERY_S)
