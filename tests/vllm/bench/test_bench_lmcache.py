"""``stress.bench lmcache``: what it makes of figures and kills. LMCache need not be installed."""

from __future__ import annotations

import warnings
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from kvtier.errors import InternalError, Misuse
from stress.children import ChildFailed

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # as in conftest.py
    from stress.bench import lmcache
    from stress.bench.harness import read_options
    from stress.bench.lmcache import COLD, DAMAGED, KILLED, MEASURED, OTHER_ROWS, TORN
    from stress.bench.lmcache_sides import LMCACHE, damage, pss_in, seconds_in
    from stress.bench.sides import KVTIER

if TYPE_CHECKING:
    from pathlib import Path

FIGURES = ("first_token_ms", "lookup_us", "scheduler_us", "worker_us", "processor_s_per_gb")


def side_run(figure: float) -> dict[str, Any]:
    """Return what a side's engines have done with two prompts, all of it in order."""
    phase = {"tokens": [[1, 2], [3, 4]], "cached_tokens": 2048, **dict.fromkeys(FIGURES, figure)}
    names = (*MEASURED, KILLED, TORN, DAMAGED)
    return {name: {**phase} for name in names} | dict.fromkeys(OTHER_ROWS.values(), figure)


def test_a_ratio_is_kvtiers_over_lmcaches_of_each_figure() -> None:
    runs = [{LMCACHE: side_run(4.0), KVTIER: side_run(2.0)}]
    rows = lmcache.rows(runs)
    assert len(rows) == len(lmcache.PHASE_ROWS) + len(OTHER_ROWS)
    assert {(row[LMCACHE], row[KVTIER], row["ratio"]) for row in rows} == {(4.0, 2.0, 0.5)}


def test_there_is_no_ratio_to_nothing() -> None:
    rows = lmcache.rows([{LMCACHE: side_run(0.0), KVTIER: side_run(2.0)}])
    assert {row["ratio"] for row in rows} == {None}


def test_wrong_tokens_after_damage_are_counted_and_before_it_refused() -> None:
    found = {LMCACHE: side_run(1.0), KVTIER: side_run(1.0)}
    found[LMCACHE][DAMAGED] = {"tokens": [[1, 2], [9, 9]], "cached_tokens": 1024}
    told = {fact["name"]: fact for fact in lmcache.facts(lmcache.check(found))}
    damaged = told["files damaged, new engine and server"]
    assert damaged[LMCACHE] == "1 of 2 right, 50% loaded"
    assert damaged[KVTIER] == "2 of 2 right, 100% loaded"
    found[LMCACHE][COLD]["tokens"] = [[1, 2], [9, 9]]
    with pytest.raises(InternalError, match="lmcache, cold: output tokens differ"):
        lmcache.check(found)


def test_prompts_that_an_engine_was_killed_over_have_tokens_of_their_own() -> None:
    """They are compared with the other side's: no engine that was not killed has computed them."""
    found = {LMCACHE: side_run(1.0), KVTIER: side_run(1.0)}
    for run in found.values():
        run[TORN] = {"tokens": [[5, 6], [7, 8]], "cached_tokens": 0}
    told = {fact["name"]: fact for fact in lmcache.facts(found)}
    assert told["the same, prompts that it was killed over"][LMCACHE] == "2 of 2 right, 0% loaded"


def test_what_the_kernel_tells_of_a_process_is_read() -> None:
    fields = ["S", *map(str, range(1, 11)), "150", "50", "30", "20", "0"]
    assert seconds_in(f"7 (a ) name) {' '.join(fields)}", ticks_per_s=100) == 2.5
    assert pss_in("Rss:     9216 kB\nPss:     2048 kB\nPss_Dirty:   512 kB\n") == 2.0


def test_damage_leaves_a_files_size_and_its_ends(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(1 << 20))
    damage(tmp_path)
    after = path.read_bytes()
    assert len(after) == 1 << 20
    assert not any(after[:4096])
    assert not any(after[-4096:])
    assert (1 << 20) / 5 < len(after) - after.count(0) < (1 << 20) / 4


def test_an_engine_that_its_killed_server_takes_along_is_a_finding() -> None:
    """The run goes on: LMCache's connector may wait for longer than anybody, and then raise."""

    class DeadPart:
        process = SimpleNamespace(kill=lambda: None)

        def ask(self, **_order: Any) -> None:
            raise ChildFailed("log\nXTimeoutError: STORE timed out\nlast line")

    found: dict[str, Any] = {}
    asked = read_options(lmcache.OPTIONS, "lmcache", [])
    part: Any = DeadPart()
    side: Any = SimpleNamespace()
    assert not lmcache.SideEngine(part, side, asked, found).phase_without_server()
    assert found[KILLED] == "the engine failed: XTimeoutError: STORE timed out"


def test_options_that_cannot_be_run_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_name: str) -> str:
        raise PackageNotFoundError

    monkeypatch.setattr(lmcache, "version", lambda _name: "0.5.6")
    asked = read_options(lmcache.OPTIONS, "lmcache", ["--block-tokens", "48"])
    with pytest.raises(Misuse, match="--block-tokens 48 must divide 1024"):
        lmcache.measure(asked, {})
    monkeypatch.setattr(lmcache, "version", missing)
    with pytest.raises(Misuse, match="LMCache is not installed"):
        lmcache.measure(asked, {})
