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
    ("5", lambda o: o.seconds("key"), 'text with a unit such as "30s"'),
    ("0s", lambda o: o.seconds("key"), "above 0"),
    ("2h", lambda o: o.seconds("key", maximum=3600), "at most 3600"),
    ("1.5s", lambda o: o.whole_seconds("key"), "whole seconds"),
    ("9d", lambda o: o.whole_seconds("key", maximum=86_400), "at most 86400"),
    (1.0, lambda o: o.whole_seconds("key"), "whole number"),
    ("", lambda o: o.text("key"), "non-empty"),
    (7, lambda o: o.text("key"), "non-empty text"),
    ("x", lambda o: o.text("key", choices=("a", "b")), "one of a, b."),
    (
        "LUR",
        lambda o: o.text("key", choices=("lru", "arc")),
        "arc (did you mean 'lru'?).",
    ),
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


@pytest.mark.parametrize(
    ("written", "seconds"),
    [
        ("500ms", 0.5),
        (" 30 s", 30),
        ("5m", 300),
        ("1.5h", 5400),
        ("7D", 604_800),
        (7, 7),
        (0.5, 0.5),
    ],
)
def test_a_duration_is_a_number_or_has_a_unit(written: object, seconds: float) -> None:
    options = Options({"key": written}, "here")
    assert options.seconds("key") == seconds
    if written != 0.5 and seconds >= 1:
        assert options.whole_seconds("key") == seconds
        assert type(options.whole_seconds("key")) is int


def test_a_missing_key_is_named_with_the_unknown_one_that_was_given_instead() -> None:
    options = Options({"paths": "/kv", "type": "x"}, "here")
    with pytest.raises(ConfigError) as refused:
        options.text("path")
    assert str(refused.value) == (
        "here: path is missing, and 'paths' (value '/kv') is unknown: did you mean 'path'?"
    )
    options.allow("paths")
    with pytest.raises(ConfigError, match=r"path is missing\. Set it"):
        options.text("path")


def test_a_missing_key_is_named() -> None:
    with pytest.raises(ConfigError, match="here: path is missing"):
        Options({}, "here").text("path")


def test_an_unknown_key_is_refused_with_the_nearest_one() -> None:
    options = Options({"block_sise": 16}, "here")
    options.integer("block_size", 0)
    with pytest.raises(ConfigError, match=r"'block_sise' \(value 16\); did you mean 'block_size'"):
        options.finish()


def test_the_value_of_an_unknown_key_that_may_be_a_secret_is_not_shown() -> None:
    with pytest.raises(ConfigError) as refused:
        Options({"redis_Password": "hunter2"}, "here").finish()
    assert "hunter2" not in str(refused.value)


def test_a_key_that_is_read_elsewhere_is_allowed() -> None:
    options = Options({"other": 1}, "here")
    options.allow("other")
    options.finish()
