"""What backends count only grows, though each life of a tier counts from 0 again."""

from __future__ import annotations

from hypothesis import given, strategies

from kvtier.core.backend_counts import BackendCounts

NAMES = strategies.sampled_from(["stored", "failed", "blocks"])
LIFE = strategies.lists(strategies.dictionaries(NAMES, strategies.integers(0, 9)), max_size=4)


@given(lives=strategies.lists(LIFE, max_size=5))
def test_totals_never_fall_whatever_backends_tell(lives: list[list[dict[str, int]]]) -> None:
    """One may count from 0 again, forget a name, or count down what it should not."""
    counts = BackendCounts()
    counts.levels = frozenset(["blocks"])
    shown: dict[str, int] = {}
    for life in lives:
        for told in life:
            counts.add(told)
            for name, count in shown.items():
                if name != "blocks":
                    assert counts.total[name] >= count
            if "blocks" in told:
                assert counts.total["blocks"] == told["blocks"]
            shown = dict(counts.total)
        counts.restart()
        assert "blocks" not in counts.total, "nobody knows what the next life has"
        assert {name: n for name, n in shown.items() if name != "blocks"} == counts.total


def test_lives_are_added_up() -> None:
    counts = BackendCounts()
    counts.levels = frozenset(["blocks"])
    counts.add({"stored": 5, "blocks": 5})
    counts.restart()
    counts.add({"stored": 7, "blocks": 2})
    counts.add({"stored": 8, "blocks": 1, "failed": 1})
    assert counts.total == {"stored": 13, "blocks": 1, "failed": 1}
