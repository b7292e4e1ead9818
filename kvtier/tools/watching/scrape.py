"""Scrapes several servers at once: one that hangs or is slow does not delay the others."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from kvtier.plugin_api.threads import BoundedCall
from kvtier.tools.watching.page import ANSWER_S_MAX, NoPage, Page, fetch
from kvtier.tools.watching.readings import read_engines

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvtier.tools.watching.readings import EngineReading

NO_KVTIER: Final = "it shows no metrics of kvtier: look at spec_name in its --kv-transfer-config"

WAIT_S: Final = ANSWER_S_MAX + 1.0
"""Longer than ``ANSWER_S_MAX``, so that a silent server and a slow one are distinguished."""


class Scraped(NamedTuple):
    """Engines found at some addresses."""

    engines: list[EngineReading]
    silent: dict[str, str]  #: addresses without an engine with kvtier, and the reasons


def scrape(urls: Sequence[str]) -> Scraped:
    """Read the pages of some servers."""
    found = Scraped([], {})
    for url, read in read_pages(urls, WAIT_S):
        if isinstance(read, str):
            found.silent[url] = read
        else:
            found.engines.extend(engine for engine, _ in read)
    return found


def read_pages(
    urls: Sequence[str], wait_s: float
) -> Iterator[tuple[str, list[tuple[EngineReading, Page]] | str]]:
    """Yield each address with its engines and their page, or with the reason why it has none."""
    ends = time.monotonic() + wait_s
    calls = [BoundedCall(partial(_read_page, url), "kvtier-page") for url in urls]
    for url, call in zip(urls, calls, strict=True):
        if call.wait(max(0.0, ends - time.monotonic())):
            yield url, call.result()
        else:
            yield url, f"it does not answer within {wait_s:g} s"


def _read_page(url: str) -> list[tuple[EngineReading, Page]] | str:
    try:
        page = fetch(url)
    except NoPage as reason:
        return f"no answer ({reason})"
    try:
        return [(engine, page) for engine in read_engines(url, page)] or NO_KVTIER
    except (KeyError, ValueError) as odd:
        return f"its metrics are not those of this version of kvtier ({odd})"
