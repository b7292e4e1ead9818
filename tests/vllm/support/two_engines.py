"""Two engines on one storage, in processes of their own, which serve at the same time."""

from __future__ import annotations

import json
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from tests.support.patience import until
from tests.vllm.support.children import run_scenario, start_scenario
from tests.vllm.support.engine import engine, kvtier_config
from tests.vllm.support.peers import Peer, serve
from tests.vllm.support.play import prompts_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from tests.vllm.support.children import Child

LENGTHS = [500, 1000, 333, 31]  #: in tokens; the last one is shorter than a block
NOTHING_NEW = [[3]]  #: a prompt shorter than a block, which no tier sees


class Serving(Peer):
    """An engine with one tier that serves whatever it is asked."""

    def __init__(self, child: Child, folder: Path) -> None:
        super().__init__(child, folder, 0)
        self._counts: dict[str, float] = {}  # at the last look

    def tier(self) -> dict[str, Any]:
        """Have the engine step; return what its tier's link says. No count of it may fall."""
        (tier,) = self.run(NOTHING_NEW, None, 1)["statistics"]["tiers"]
        fallen = [name for name, count in self._counts.items() if tier["counts"][name] < count]
        assert not fallen, (fallen, self._counts, tier)
        self._counts = tier["counts"]
        return dict(tier)

    def until_stored(self) -> None:
        """Wait until all that was given to the tier is there."""
        until(lambda: self.tier()["cascade_jobs_in_flight"] == 0)

    def until_connection_is(self, state: float) -> None:
        """Wait until a scrape of the metrics of a ``redis`` tier says so."""
        name = 'kvtier:tier_connection_state{tier="1:redis"}'
        until(lambda: self.run(NOTHING_NEW, None, 1)["metrics"][name] == state)


@contextmanager
def serving(
    name: str,
    model: Path,
    tier: dict[str, Any],
    log_folder: Path,
    tmp_path: Path,
    environment: Mapping[str, str],
) -> Iterator[Serving]:
    """Run an engine with this tier. ``name``: of its folder, under ``tmp_path``, made here."""
    folder = tmp_path / name
    folder.mkdir()
    with start_scenario(
        serve,
        log_folder / name,
        environment,
        model=str(model),
        extra_config=kvtier_config(secondary_tiers=[tier]),
        folder=str(folder),
    ) as child:
        yield Serving(child, folder)


class Two:
    """Two engines on one tier, and what an engine without one answers to each part."""

    def __init__(
        self,
        engines: Sequence[Serving],
        parts: Sequence[list[list[int]]],
        plain: Sequence[list[list[int]]],
    ) -> None:
        self.engines = engines
        self._parts = parts
        self._plain = plain

    def ask(self, *numbers: int, forget: bool = False) -> list[Path]:
        """Ask each engine for a part at the same time; return where the answers will be."""
        both = zip(self.engines, numbers, strict=True)
        return [self.ask_one(engine, number, forget=forget) for engine, number in both]

    def ask_one(self, engine: Serving, number: int, *, forget: bool = False) -> Path:
        """Ask an engine, which may be a third one; return where the answer will be."""
        return engine.ask(self._parts[number], forget=forget)

    def cached(self, asked: Sequence[Path], *numbers: int) -> list[int]:
        """Wait for the answers, which must be the plain ones; return how much was loaded."""
        each = zip(self.engines, asked, numbers, strict=True)
        return [self.cached_by(engine, answer, number) for engine, answer, number in each]

    def cached_by(self, engine: Serving, answer: Path, number: int) -> int:
        """Wait for an answer, which must be the plain one; return how much was loaded."""
        told = json.loads(engine.child.wait_for(answer))
        assert told["tokens"] == self._plain[number]
        return sum(told["cached"])

    def both(self, *numbers: int) -> list[int]:
        """Have each compute or load a part at the same time; return how much was loaded."""
        return self.cached(self.ask(*numbers, forget=True), *numbers)

    def until_stored(self) -> None:
        """Wait until all that was given to the tier is there."""
        for each in self.engines:
            each.until_stored()


def tokens_of_all(model: str, parts: list[list[list[int]]]) -> list[list[list[int]]]:
    with engine(model, None) as running:
        return [running.run_one_by_one(prompts).tokens for prompts in parts]


@contextmanager
def two_serving(
    model: Path,
    tiers: Sequence[dict[str, Any]],
    parts_count: int,
    log_folder: Path,
    tmp_path: Path,
    environment: Mapping[str, str],
) -> Iterator[Two]:
    """Run an engine with each of the two tiers, and compute so many parts without one."""
    parts = [prompts_of(LENGTHS, 1000 * number) for number in range(1, parts_count + 1)]
    plain = run_scenario(tokens_of_all, log_folder=log_folder, model=str(model), parts=parts)
    with ExitStack() as running:
        engines = [
            running.enter_context(serving(name, model, tier, log_folder, tmp_path, environment))
            for name, tier in zip(("one", "other"), tiers, strict=True)
        ]
        yield Two(engines, parts, plain)
