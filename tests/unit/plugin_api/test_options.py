from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kvtier.errors import ConfigError
from kvtier.plugin_api.options import Options

if TYPE_CHECKING:
    from collections.abc import Callable

REFUSED: list[tuple[Any, Callable[[Options], object], str]] = [
    ("5", lambda o: o.integer("key"), "whole number, without quotes"),
    (True, lambda o: o.integer("key"), "whole number"),
    (1.0, lambda o: o.integer("key"), "whole number"),
    (-1, lambda o: o.integer("key"), "at least 0"),
    (9, lambda o: o.integer("key", maximum=8), "at most 8"),
    ("1", lambda o: o.number("key"), "a number, without quotes"),
    (False, lambda o: o.number("key"), "a number"),
    (0, lambda o: o.number("key"), "above 0"),
    (float("nan"), lambda o: o.number("key"), "above 0"),
    (2, lambda o: o.number("key", maximum=1), "at most 1"),
    (1, lambda o: o.number("key", above=1), "above 1"),
    (-0.5, lambda o: o.number("key", minimum=0, maximum=1), "at least 0 and at most 1"),
    (float("nan"), lambda o: o.number("key", minimum=0), "at least 0"),
    ("", lambda o: o.text("key"), "non-empty"),
    (7, lambda o: o.text("key"), "non-empty text"),
    ("x", lambda o: o.text("key", choices=("a", "b")), "one of a, b"),
    (1, lambda o: o.flag("key"), "true or false"),
    ("true", lambda o: o.flag("key"), "true or false"),
    ([], lambda o: o.mapping("key"), "a mapping"),
    ({}, lambda o: o.mappings("key"), "a list of mappings"),
    ([1], lambda o: o.mappings("key"), "a list of mappings"),
    (1, lambda o: o.refuse("key", "is gone. Use other"), "Use other"),
]


@pytest.mark.parametrize(("value", "read", "remedy"), REFUSED)
def test_a_bad_value_is_refused_with_key_value_and_remedy(
    value: object, read: Callable[[Options], object], remedy: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        read(Options({"key": value}, "somewhere"))
    assert "somewhere" in str(caught.value)
    assert f"key={value!r}" in str(caught.value)
    assert remedy in str(caught.value)


def test_good_values_are_returned() -> None:
    options = Options(
        {"i": 3, "n": 2, "t": "a", "f": False, "m": {"x": 1}, "l": [{}], "none": None}, "here"
    )
    assert options.integer("i") == 3
    assert options.number("n") == 2.0
    assert options.text("t", choices=("a",)) == "a"
    assert options.flag("f") is False
    assert options.mapping("m") == {"x": 1}
    assert options.mappings("l") == [{}]
    assert options.integer("none", 4) == 4
    options.finish()


def test_a_missing_key_is_named() -> None:
    with pytest.raises(ConfigError, match="here: path is missing"):
        Options({}, "here").text("path")


def test_an_unknown_key_is_refused_with_the_nearest_one() -> None:
    options = Options({"block_sise": 16}, "here")
    options.integer("block_size", 0)
    with pytest.raises(ConfigError, match=r"'block_sise' \(value 16\); did you mean 'block_size'"):
        options.finish()


def test_a_key_that_is_read_elsewhere_is_allowed() -> None:
    options = Options({"other": 1}, "here")
    options.allow("other")
    options.finish()
