"""What all benchmarks of ``stress.bench`` share."""

from __future__ import annotations

from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any

import pytest

from kvtier.errors import Misuse
from stress.bench import harness
from stress.bench.harness import Option, orders, ratio, read_options

if TYPE_CHECKING:
    from pathlib import Path


def test_sides_take_turns_in_going_first_and_each_order_comes_as_often() -> None:
    two = list(islice(orders("ab"), 6))
    assert all(first != then for first, then in pairwise(two))
    three = list(islice(orders("abc"), 12))
    assert all(three.count(order) == 2 for order in three)


def test_a_ratio_is_that_of_medians_beside_those_of_the_runs() -> None:
    found = ratio([1.0, 6.0, 2.0], [2.0, 4.0, 8.0])
    assert found == {"ratio": 0.5, "ratio_min": 0.25, "ratio_max": 1.5}


def test_the_default_says_what_an_option_takes() -> None:
    options = [Option("--so-many", 3, "n"), Option("--what", "x", "t"), Option("--is", False, "f")]
    asked = read_options(options, "bench", ["--so-many", "2", "--is"])
    assert vars(asked) == {"so_many": 2, "what": "x", "is": True, "json": None}
    with pytest.raises(Misuse, match="--so-many 0 must be at least 1"):
        read_options(options, "bench", ["--so-many", "0"])


def test_what_was_measured_before_an_interruption_is_shown_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[dict[str, Any]] = []

    class Interrupted:
        OPTIONS = (Option("--runs", 5, "n"),)

        @staticmethod
        def measure(asked: Any, report: dict[str, Any]) -> None:
            report["runs"] = [asked.runs]
            raise KeyboardInterrupt

        @staticmethod
        def show(report: dict[str, Any]) -> None:
            shown.append(report)

    monkeypatch.setattr(harness, "import_module", lambda _: Interrupted)
    report = tmp_path / "report.json"
    with pytest.raises(KeyboardInterrupt):
        harness.run_benchmark("any", "bench", ["--json", str(report)])
    assert shown[0]["runs"] == [5]
    assert '"options": {\n    "runs": 5\n  }' in report.read_text()
