"""Stories that end badly if one mistake is made in the real code, and well otherwise.

A story is what Hypothesis drew, as the blob that ``@reproduce_failure`` takes. Finding one
takes seconds to minutes of search, and depends on what is drawn; to play it again takes
milliseconds, and it is the same story each time. The blobs are in ``counterexamples.json``.
"""

from __future__ import annotations

import gc
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import hypothesis
from hypothesis import HealthCheck, Phase, Verbosity, reproduce_failure, seed, settings
from hypothesis.core import decode_failure, encode_failure
from hypothesis.errors import DidNotReproduce, HypothesisException
from hypothesis.internal.conjecture import engine
from hypothesis.stateful import run_state_machine_as_test

if TYPE_CHECKING:
    from machine import KVTierSpec
    from mistakes import Mistake

FILE = Path(__file__).with_name("counterexamples.json")
FIND = "make counterexamples NAMES="
STEPS = 60
EXAMPLES_A_SEED = 1_500
SEEDS_MAX = 20
"""Most mistakes are caught within a hundred; for some, four things must come together in one."""

SHRINKING_S_MAX = 10
"""Enough for a short blob. The shortest story would take minutes."""

_PRINTED = re.compile(r"@reproduce_failure\('[^']*', b'([^']*)'\)")


class UnfitError(AssertionError):
    """Raised when a stored story can't be told any more: the rules or Hypothesis are others."""


@dataclass(frozen=True)
class Verdict:
    """What the model says of a run."""

    complaint: str = ""  # of the first promise that was broken, or nothing
    blob: str = ""  # of the story, if Hypothesis was asked for it

    @property
    def is_the_models(self) -> bool:
        """Tell whether a promise was broken, by the mistake and not by how it is made.

        A mutation of a method that has other parameters by now fails by itself.
        """
        return bool(self.complaint) and "argument" not in self.complaint


def profile(examples: int, *phases: Phase) -> settings:
    """Return settings that draw what the seed says, and nothing that was found before."""
    return settings(
        max_examples=examples,
        stateful_step_count=STEPS,
        database=None,
        print_blob=True,
        phases=phases,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )


def search(spec: type[KVTierSpec], examples: int, number: int, *phases: Phase) -> Verdict:
    """Look for a story that ends badly. ``number``: the seed."""
    seeded = type(spec.__name__, (spec,), {})
    phases = phases or (Phase.generate,)
    try:
        run_state_machine_as_test(seed(number)(seeded), settings=profile(examples, *phases))
    except HypothesisException:
        raise  # it is no verdict of the model
    except Exception as error:  # noqa: BLE001 - a broken promise may be any failure
        printed = _PRINTED.search("\n".join(getattr(error, "__notes__", ())))
        return Verdict(repr(error), printed[1] if printed else "")
    finally:
        _close_what_never_ended()
    return Verdict()


def play(spec: type[KVTierSpec], blob: str, found_with: str) -> Verdict:
    """Tell one story again. It ends where it was cut off, and is at rest then, or badly."""
    ends = []

    def teardown(self: Any) -> None:
        is_told = sys.exc_info()[0] is None
        spec.teardown(self)
        if is_told:
            ends.append(True)

    told = type(spec.__name__, (spec,), {"teardown": teardown})
    told = reproduce_failure(found_with, blob.encode())(told)  # type: ignore[arg-type]
    try:
        quiet = settings(profile(1, Phase.generate), verbosity=Verbosity.quiet)
        run_state_machine_as_test(told, settings=quiet)
    except DidNotReproduce as error:
        if not ends:
            raise UnfitError(str(error)) from None
        return Verdict()
    except HypothesisException as error:
        raise UnfitError(str(error)) from None
    except Exception as error:  # noqa: BLE001 - a broken promise may be any failure
        return Verdict(repr(error))
    finally:
        _close_what_never_ended()
    raise AssertionError("Hypothesis always raises here")


def _close_what_never_ended() -> None:
    """Coroutines of a run that failed are closed here, and not in the midst of the next test."""
    gc.collect()


def seeds(mistake: Mistake) -> range:
    """Return the seeds to search with, one after the other: any finds it, sooner or later."""
    return range(mistake.first_seed, mistake.first_seed + SEEDS_MAX)


def is_caught(mistake: Mistake) -> bool:
    """Search from scratch, without what was found before."""
    with mistake.made():
        for number in seeds(mistake):
            found = search(mistake.spec, EXAMPLES_A_SEED, number)
            if found.complaint:
                assert found.is_the_models, f"the mistake does not fit the code: {found.complaint}"
                return True
    return False


def find(mistake: Mistake) -> str:
    """Return the blob of a story that only this mistake ends badly."""
    for number in seeds(mistake):
        with (
            mistake.made(),
            patch.object(engine, "MAX_SHRINKING_SECONDS", SHRINKING_S_MAX),
        ):
            found = search(mistake.spec, EXAMPLES_A_SEED, number, Phase.generate, Phase.shrink)
        if found.is_the_models and found.blob:
            # One more choice: to end there. Without it, the story would want to go on.
            blob = encode_failure([*decode_failure(found.blob.encode()), True]).decode()
            if tells(mistake, blob):
                return blob
    raise AssertionError(f"no story found in {SEEDS_MAX} seeds of {EXAMPLES_A_SEED} examples")


def tells(mistake: Mistake, blob: str) -> bool:
    """Tell whether a story ends badly with a mistake, and well without."""
    try:
        with mistake.made():
            is_caught = play(mistake.spec, blob, hypothesis.__version__).is_the_models
        return is_caught and not play(mistake.spec, blob, hypothesis.__version__).complaint
    except UnfitError:
        return False


def stored() -> tuple[str, dict[str, str]]:
    """Return the version of Hypothesis that found the blobs, and the blobs by mistake."""
    found = json.loads(FILE.read_text())
    return found["hypothesis"], found["counterexamples"]


def store(blobs: dict[str, str]) -> None:
    """Write the file anew: a mistake a line, in order."""
    content = {"hypothesis": hypothesis.__version__, "counterexamples": dict(sorted(blobs.items()))}
    FILE.write_text(json.dumps(content, indent=1) + "\n")
