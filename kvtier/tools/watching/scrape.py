"""Scrapes several servers at once: one that hangs holds up none of the others."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final, NamedTuple

from kvtier.tools.watching.page import NoPage, fetch
from kvtier.tools.watching.readings import read_engines

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtier.tools.watching.readings import EngineReading

NO_KVTIER: Final = "it shows no metrics of kvtier: look at spec_name in its --kv-transfer-config"


class Scraped(NamedTuple):
    """What was found at some addresses."""

    engines: list[EngineReading]
    silent: dict[str, str]  #: addresses without an engine of kvtier's, and why


def scrape(urls: Sequence[str]) -> Scraped:
    """Read the pages of some servers."""
    found = Scraped([], {})
    with ThreadPoolExecutor(max_workers=len(urls)) as threads:
        for url, engines in zip(urls, threads.map(_scrape_one, urls), strict=True):
            if isinstance(engines, str):
                found.silent[url] = engines
            else:
                found.engines.extend(engines)
    return found


def _scrape_one(url: str) -> list[EngineReading] | str:
    try:
        page = fetch(url)
    except NoPage as reason:
        return f"no answer ({reason})"
    try:
        return read_engines(url, page) or NO_KVTIER
    except (KeyError, ValueError) as odd:
        return f"its metrics are not those of this version of kvtier ({odd})"
