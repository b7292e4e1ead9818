"""One scenario: requests come, are aborted, and end; then all must be at rest.

Everything in it is drawn from its seed, so the seed plays it again.
"""

from __future__ import annotations

import random
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.rig.at_rest import Counters, NotAtRest, left_over
from tests.rig.engine import engine
from tests.rig.happenings import Happenings
from tests.rig.runner import CopiedTooEarly
from tests.rig.shape import draw_shape, next_life

if TYPE_CHECKING:
    from tests.rig.engine import Engine
    from tests.rig.shape import Shape

STEPS_MAX = 5_000
SETTLING_STEPS_MAX = 2_000


@dataclass(frozen=True)
class Played:
    """What a scenario did."""

    steps: int
    tokens_checked: int
    loads: int

    def __add__(self, more: Played) -> Played:
        """Add up two."""
        return Played(
            self.steps + more.steps,
            self.tokens_checked + more.tokens_checked,
            self.loads + more.loads,
        )


def play(seed: int, **focus: Any) -> Played:
    """Play the scenario of a seed. Raises what went wrong, with seed and shape in a note.

    ``focus``: fields of the shape that are not as drawn.
    """
    rng = random.Random(seed)
    shape = replace(draw_shape(rng), **focus)
    played = Played(0, 0, 0)
    try:
        with tempfile.TemporaryDirectory(prefix="kvtier-rig-") as folder:
            of_life = shape
            for _ in range(shape.lives):
                with engine(of_life, rng, Path(folder)) as running:
                    played += _Scenario(running, of_life, rng).play()
                of_life = next_life(shape, rng)
    except CopiedTooEarly:
        pass  # vLLM's own mistake: the scenario ends
    except BaseException as error:
        error.add_note(f"seed {seed}: {shape}")
        raise
    return played


class _Scenario:
    def __init__(self, running: Engine, shape: Shape, rng: random.Random) -> None:
        self._engine = running
        self._happenings = Happenings(running, shape, rng, self._step)
        self._counters = Counters()
        self._steps = 0

    def play(self) -> Played:
        while not self._happenings.are_over or self._engine.has_work:
            self._happenings.happen()
            self._step()
        self._settle()
        loads = sum(worker.device.copied["load"] for worker in self._engine.workers)
        return Played(self._steps, self._engine.world.tokens_checked, loads)

    def _step(self) -> None:
        self._steps += 1
        if self._steps > STEPS_MAX:
            raise NotAtRest(f"after {STEPS_MAX} steps there is {self._engine.told()}")
        outputs = self._engine.step()
        self._counters.check(self._engine.facade.statistics(), outputs)

    def _settle(self) -> None:
        """Step until nobody has anything to do, and check that nothing is left."""
        self._happenings.end()
        facade = self._engine.facade
        left: dict[str, Any] = {}
        for _ in range(SETTLING_STEPS_MAX):
            # An idle engine steps no more, and what hung comes back all the same.
            facade.step_end()
            self._step()
            left = left_over(facade.statistics(), void=self._happenings.void)
            if not left and self._engine.listener is not None:
                left = self._engine.listener.differences()
            if not (left or facade.has_pending_work() or self._engine.has_work):
                break
        if left:
            raise NotAtRest(f"at rest there is {left}")
