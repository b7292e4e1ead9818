"""Measures the prompt tokens that the engine's steps compute, from vLLM's offloading interface.

vLLM reports to a manager neither how many tokens a step computes, nor how long it takes. But it
offers each step's new chunks to be stored, with the tokens that they end at, in the step that
computes them; it calls ``on_schedule_end`` once a step; and it looks up a request behind the
tokens that the GPU has of it, before it is scheduled. So a request has computed the offered
tokens that lie behind the first key it looked up, behind those loaded, and behind those offered
before; up to the end of its prompt, because generated tokens are computed one by one. This is
exact except for the prompt's last, partial chunk.

Time counts while the engine has a request that is not waiting. Where vLLM offers a step's chunks
after its ``on_schedule_end``, they are known when the step has ended; where it offers them before
that (``kvtier/vllm/releases.py``), they are kept for one step more. The shift due to async
scheduling is determined by ``kvtier/engine/decide/prefill_speed.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from kvtier.core.messages import TokenPlace
from kvtier.engine.decide.prefill_speed import LAG_MAX
from kvtier.vllm.releases import OFFERS_BEFORE_STEP_ENDS

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from kvtier.engine.facade import SchedulerFacade


WINDOW: Final = 4
REST: Final = 12
"""If the engine's speed decides nothing, ``WINDOW`` steps that compute prompts are reported, then
none until requests have begun in ``REST`` steps: learning from a step takes as long as several
lookups."""


class Prompt:
    """Progress of one request's prompt, in tokens."""

    __slots__ = ("computed", "end", "is_loading")

    def __init__(self) -> None:
        self.computed: int | None = None  # unknown, because nothing was looked up
        self.end = 0
        self.is_loading = False  # nothing is computed for it


class PrefillSteps:
    """Adds up the tokens one engine computes, step by step, and reports them to the facade."""

    def __init__(
        self,
        chunk_tokens: int,
        tell: Callable[[int, int, float | None], None],
        *,
        is_decided_by: bool,
        offers_first: bool,
    ) -> None:
        """``chunk_tokens``: what a key covers, with one KV-cache group. ``tell``: gets each report.

        ``is_decided_by``: whether the engine's speed decides what is loaded.
        ``offers_first``: whether vLLM offers a step's chunks before it calls ``on_schedule_end``.
        """
        self._reports_all = is_decided_by
        #: whether to call ``on_step_end``: one of the last steps may have computed a prompt
        self.is_awake = True
        self._reported = 0  # steps that computed prompts, since the last rest
        self._rest = 0  # steps with new requests until one is reported
        self._offers_first = offers_first
        self._begun = (0, 0)  # computed by the step that has begun
        self._chunk_tokens = chunk_tokens
        self._tell = tell
        self._loading = 0  # prompts
        self._tokens = self._attention = 0  # of this step
        self._quiet = LAG_MAX  # steps in a row that computed no prompt
        self._began = 0.0  # when the previous step ended
        self._busy_until: float | None = None  # since when there is nothing to compute
        self._was_busy = False

    @classmethod
    def of(cls, facade: SchedulerFacade, chunk_tokens: int) -> PrefillSteps:
        """Return an instance that reports to this facade, for the installed vLLM."""
        return cls(
            chunk_tokens,
            facade.on_step_computed,
            is_decided_by=facade.decides_by_speed,
            offers_first=OFFERS_BEFORE_STEP_ENDS,
        )

    def looks_up(self, prompt: Prompt, key: bytes, end_of: dict[bytes, int]) -> TokenPlace | None:
        """Note that a request waits, and looks up ``key`` first. Return the key's place."""
        end = end_of.get(key)
        if end is None:
            return None
        first = max(0, end - self._chunk_tokens)
        prompt.computed, prompt.end = first, next(reversed(end_of.values()))
        return TokenPlace(first, self._chunk_tokens)

    def looks_up_from(self, prompt: Prompt, first_token: int, end_of: Mapping[bytes, int]) -> None:
        """Note the same for a request whose keys belong to several groups."""
        prompt.computed, prompt.end = first_token, max(end_of.values(), default=0)

    def on_load(
        self, prompt: Prompt, keys: Collection[bytes], end_of: dict[bytes, int]
    ) -> tuple[int, int] | None:
        """Note that the GPU reads a request's prompt up to the last of ``keys``.

        Return where the tokens that it need not compute begin and end, if that is known. Several
        groups are all read up to the same token.
        """
        self._loading += not prompt.is_loading
        prompt.is_loading = True
        before = prompt.computed
        if before is None or not keys:
            return None
        prompt.computed = max(before, end_of.get(_last(keys), 0))
        return before, prompt.computed

    def on_loaded(self, prompt: Prompt) -> None:
        """Note that a request's load has ended, or the request."""
        self._loading -= prompt.is_loading
        prompt.is_loading = False

    def on_offer(self, prompt: Prompt, keys: Collection[bytes], end_of: dict[bytes, int]) -> None:
        """Note that a request has computed its prompt up to the last of ``keys``."""
        if not keys:
            return
        end, before = end_of.get(_last(keys), 0), prompt.computed
        if before is None:  # there was nothing to look up; how much the GPU had is unknown
            prompt.computed, prompt.end = end, next(reversed(end_of.values()), 0)
            return
        end = min(end, prompt.end)
        if end <= before:
            return
        prompt.computed = end
        if self._rest:
            return
        self.is_awake = True
        self._tokens += end - before
        self._attention += end * end - before * before

    def on_idle(self, now: float, others: int) -> None:
        """Note the time if none of ``others`` running requests computes anything any more."""
        if others <= self._loading and self._was_busy and self._busy_until is None:
            self._busy_until = now

    def on_scheduled(self) -> None:
        """Note that requests begin in this step."""
        self._rest -= self._rest > 0
        if self._rest:
            return
        self._quiet = 0
        self.is_awake = True

    def on_step_end(self, now: float, others: int) -> None:
        """Report a step. ``others``: running requests, except those that wait for lookups."""
        tokens, attention = self._tokens, self._attention
        self._tokens = self._attention = 0
        if self._offers_first:
            (tokens, attention), self._begun = self._begun, (tokens, attention)
        self._quiet = 0 if tokens else self._quiet + 1
        if self._quiet <= LAG_MAX:
            until = now if self._busy_until is None else self._busy_until
            self._tell(tokens, attention, until - self._began if self._was_busy else None)
        self.is_awake = self._quiet <= LAG_MAX
        self._began = now
        self._busy_until = None
        self._was_busy = others > self._loading
        if tokens and not self._reports_all:
            self._reported += 1
            if self._reported == WINDOW:
                self._begin_rest()

    def _begin_rest(self) -> None:
        self._reported, self._rest = 0, REST
        self._begun = (0, 0)
        self.is_awake = self._was_busy = False


def _last(keys: Collection[bytes]) -> bytes:
    """Return the last key. vLLM passes lists: other collections take longer."""
    return keys[-1] if isinstance(keys, Sequence) else list(keys)[-1]
