"""What backends count only grows, though each life of a tier counts from 0 again."""

from __future__ import annotations

from hypothesis import given, strategies

from kvtier.core.backend_counts import BackendCounts
from kvtier.core.wire import Counted

NAMES = strategies.sampled_from(["stored", "failed"])
LIFE = strategies.lists(
    strategies.builds(
        Counted,
        strategies.dictionaries(NAMES, strategies.integers(0, 9)),
        strategies.dictionaries(strategies.just("blocks"), strategies.integers(0, 9)),
    ),
    max_size=4,
)


@given(lives=strategies.lists(LIFE, max_size=5))
def test_totals_never_fall_whatever_backends_report(lives: list[list[Counted]]) -> None:
    """One may count from 0 again, forget a name, or count down what it should not."""
    counts = BackendCounts()
    shown: dict[str, int] = {}
    for life in lives:
        for counted in life:
            counts.add(counted)
            assert all(counts.counters[name] >= count for name, count in shown.items())
            assert counts.gauges == counted.gauges
            shown = dict(counts.counters)
        counts.restart()
        assert counts.gauges == {}, "nobody knows what the next life has"
        assert shown == counts.counters


def test_lives_are_added_up() -> None:
    counts = BackendCounts()
    counts.add(Counted({"stored": 5}, {"blocks": 5}))
    counts.restart()
    counts.add(Counted({"stored": 7}, {"blocks": 2}))
    counts.add(Counted({"stored": 8, "failed": 1}, {"blocks": 1}))
    assert counts.counters == {"stored": 13, "failed": 1}
    assert counts.gauges == {"blocks": 1}
