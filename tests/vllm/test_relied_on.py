"""What the adapter relies on in vLLM is what it was when kvtier was last tested with it."""

from __future__ import annotations

import difflib
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvtier.errors import ConfigError
from kvtier.vllm import relied_on
from kvtier.vllm.relied_on import LISTED, MISSING, RIGHT_BY, Moved, check_release, lines

if TYPE_CHECKING:
    from collections.abc import Iterator

OLDER = Path(__file__).with_name("relied_on_0.32.txt")
INSTALLED = OLDER if os.environ.get("KVTIER_TEST_VLLM", "0.32") == "0.32" else LISTED


def test_every_name_and_signature_is_as_it_is_listed() -> None:
    """The lines that differ name what changed: look at each use, then list it anew."""
    before = INSTALLED.read_text().splitlines()
    changed = [
        line
        for line in difflib.unified_diff(before, lines(), "listed", "installed", n=0, lineterm="")
        if not line.startswith(("---", "+++", "@@"))
    ]
    assert not changed, "\n".join(changed)


def test_what_vllm_promises_nobody_is_little_and_marked() -> None:
    """Each private name is one that a minor release may take away."""
    private = [line for line in INSTALLED.read_text().splitlines() if line.endswith("  private")]
    names = [line.split("(")[0].split(":")[0].rpartition(".")[2] for line in private]
    assert names
    assert all(name.startswith("_") for name in names)
    assert len(names) <= 5, names  # two of them for hosted p2p tiers, one in 0.33 only


@pytest.mark.parametrize("listed", [OLDER, LISTED])
def test_each_function_by_which_answers_are_right_is_in_both_lists(listed: Path) -> None:
    """One that is misspelt would never be missed."""
    names = {line.partition("(")[0] for line in listed.read_text().splitlines()}
    assert set(RIGHT_BY) <= names


@pytest.mark.parametrize(
    ("name", "now", "is_refused"),
    [
        (RIGHT_BY[0], MISSING, True),
        (RIGHT_BY[0].rpartition(".")[0], MISSING, True),  # its class
        (RIGHT_BY[0], "(self, other, a)", True),
        (RIGHT_BY[0], "(self, ab)", True),
        (RIGHT_BY[0], "(self, a, b)", True),
        (RIGHT_BY[0], "(self, a, b=..., *, c)", True),
        (RIGHT_BY[0], "(self, a, b=..., *, c=...)", False),
        (RIGHT_BY[0], "(self, a, *args, **kwargs)", False),
        (f"{RIGHT_BY[0]}_too", MISSING, False),
    ],
)
def test_only_what_makes_answers_wrong_is_refused(name: str, now: str, is_refused: bool) -> None:
    assert Moved(name, "(self, a)", now).endangers_answers is is_refused


@pytest.fixture
def next_release(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Make the installed vLLM one that kvtier is not tested with."""
    import vllm

    relied_on._check.cache_clear()
    monkeypatch.setattr(relied_on, "LISTED", INSTALLED)
    monkeypatch.setattr(vllm, "__version__", "0.99.1")
    yield vllm.__version__
    relied_on._check.cache_clear()


def test_an_untested_release_is_named_once_with_what_has_moved(
    next_release: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from vllm.v1.kv_offload.base import OffloadingManager

    monkeypatch.delattr(OffloadingManager, "take_events")
    for _ in range(2):
        check_release()
    log = capsys.readouterr().out
    assert (
        log.count("kvtier is not tested with this vLLM") == log.count(f"vllm={next_release}") == 1
    )
    assert "moved='vllm.v1.kv_offload.base.OffloadingManager.take_events missing'" in log


def test_an_engine_does_not_start_where_answers_would_be_wrong(
    next_release: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.engine.core import EngineCore

    monkeypatch.delattr(EngineCore, "reset_prefix_cache")
    with pytest.raises(ConfigError, match=rf"vLLM {next_release}.*reset_prefix_cache missing"):
        check_release()


@pytest.mark.usefixtures("next_release")
def test_a_check_that_fails_ends_no_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(relied_on, "LISTED", Path("/nowhere"))
    check_release()
    assert "could not be checked" in capsys.readouterr().out


def test_the_program_prints_what_has_moved(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(relied_on, "LISTED", INSTALLED)
    assert relied_on.main([]) == 0
    assert "names checked, 0 missing, 0 changed" in capsys.readouterr().out
