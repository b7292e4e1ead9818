"""Each benchmark has a page, and takes the options that are printed there.

``tests/vllm/bench`` runs these commands, with smaller sizes behind what is printed.
"""

from __future__ import annotations

import warnings
from importlib import import_module

import pytest

from stress.bench.__main__ import BENCHMARKS
from stress.bench.harness import read_options
from tests.support.printed import DOCS, options_of


@pytest.mark.one_release
def test_every_printed_benchmark_takes_what_is_printed() -> None:
    pages = [path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")]
    found = [
        (page, *options)
        for page in pages
        for options in options_of(page, "stress.bench")
        if options
    ]
    assert {name for _, name, *_ in found} == {*BENCHMARKS}
    refused = []
    for page, name, *options in found:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # as in conftest.py
            benchmark = import_module(f"stress.bench.{name}")
        try:
            read_options(benchmark.OPTIONS, name, options)
        except SystemExit:
            refused.append((page, name, options))
    assert refused == []
