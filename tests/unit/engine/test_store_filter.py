from __future__ import annotations

from hypothesis import given, strategies

from kvtier.engine.primary.store_filter import StoreFilter

KEYS = strategies.sampled_from([b"a", b"b", b"c", b"d"])


@given(
    threshold=strategies.integers(1, 3),
    size=strategies.integers(1, 4),
    calls=strategies.lists(strategies.lists(KEYS, max_size=4, unique=True), max_size=30),
)
def test_a_block_is_stored_when_offered_often_enough_and_the_least_recent_is_forgotten(
    threshold: int, size: int, calls: list[list[bytes]]
) -> None:
    offers = StoreFilter(threshold, size)
    model: list[tuple[bytes, int]] = []  # least recently offered first
    for keys in calls:
        expected = []
        for key in keys:
            count = dict(model).get(key, 0) + 1
            model = [each for each in model if each[0] != key] + [(key, count)]
            if count >= threshold:
                expected.append(key)
        model = model[-size:]
        assert offers.keep(keys, keys) == expected
