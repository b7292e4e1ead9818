"""Lists the series that queries may name, from the metrics' definitions, and narrows queries.

A query is text, so that it reads like one that a person types. ``unknown_in``, which the makers of
the dashboard and of the rules call, finds metrics and labels that no longer exist.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from kvtier.core.metrics import backend_definitions, primary_definitions, tier_definitions
from kvtier_backends.disk.metrics import METRICS as OF_DISK

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from kvtier.core.metrics import Definition

ALL_HAVE: Final = frozenset({"engine", "instance", "job", "model_name"})
"""Labels of every series: vLLM's, and those of a scrape."""

OF_VLLM: Final[Mapping[str, frozenset[str]]] = {
    "vllm:kv_offload_lookup_sync_delay_seconds_sum": frozenset(),
    "vllm:kv_offload_tiering_chunk_hits_total": frozenset({"tier"}),
    "vllm:kv_offload_tiering_chunk_queries_total": frozenset({"tier"}),
    "vllm:kv_offload_tiering_read_bytes_total": frozenset({"tier"}),
    "vllm:kv_offload_tiering_write_bytes_total": frozenset({"tier"}),
    "vllm:prompt_tokens_by_source_total": frozenset({"source"}),
    "vllm:prompt_tokens_total": frozenset(),
    "vllm:request_success_total": frozenset({"finished_reason"}),
}
"""vLLM's series that queries name: labels by name. A running engine has them."""

_SUFFIXES: Final[Mapping[str, Mapping[str, tuple[str, ...]]]] = {
    "counter": {"_total": ()},
    "gauge": {"": ()},
    "histogram": {"_bucket": ("le",), "_sum": (), "_count": ()},
}
_SELECTOR: Final = re.compile(r"\b((?:kvtier|vllm):\w+)(?:\{([^}]*)\})?")
_MATCHER: Final = re.compile(r'(\w+)\s*(?:=~|!~|!=|=)\s*"[^"]*"')
_GROUPING: Final = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")
_MADE: Final = re.compile(r'\blabel_replace\(.*?, "(\w+)", "[^"]*", "\w*", "[^"]*"\)')


def _series_of(definitions: Mapping[str, Definition]) -> Iterator[tuple[str, frozenset[str]]]:
    for each in definitions.values():
        for suffix, more in _SUFFIXES[each.kind].items():
            yield each.name + suffix, frozenset((*each.labels, *more))


SERIES: Final[Mapping[str, frozenset[str]]] = {
    **OF_VLLM,
    **dict(_series_of(primary_definitions() | tier_definitions())),
    **dict(_series_of(backend_definitions("disk", OF_DISK))),
}
"""The labels of each series, besides ``ALL_HAVE``, by its name."""


def series_in(query: str) -> set[str]:
    """Return the names of the series that a query names."""
    return {name for name, _ in _SELECTOR.findall(query)}


def unknown_in(query: str) -> set[str]:
    """Return the series and labels of a query that no engine has."""
    unknown = {name for name in series_in(query) if name not in SERIES}
    there = set(ALL_HAVE)
    for name, matchers in _SELECTOR.findall(query):
        labels = SERIES.get(name, frozenset())
        there |= labels
        unknown |= {
            f"{name}{{{label}}}"
            for label in _MATCHER.findall(matchers)
            if label not in labels | ALL_HAVE
        }
    there |= set(_MADE.findall(query))
    for labels in _GROUPING.findall(query):
        unknown |= {label for each in labels.split(",") if (label := each.strip())} - there
    return unknown


def narrowed(query: str, matchers: Mapping[str, str]) -> str:
    """Return a query of only the matching series. ``matchers``: by label, ``=~"$tier"``.

    A matcher is added to each series that has the label, unless the query has one for it.
    """

    def add(found: re.Match[str]) -> str:
        name, given = found[1], found[2] or ""
        taken = set(_MATCHER.findall(given))
        labels = SERIES.get(name, frozenset()) | ALL_HAVE
        more = [f"{label}{rest}" for label, rest in matchers.items() if label in labels - taken]
        inside = ", ".join(filter(None, (given, *more)))
        return f"{name}{{{inside}}}" if inside else name

    return _SELECTOR.sub(add, query)
