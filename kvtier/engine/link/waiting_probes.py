"""Queues requests' probes until they are sent to a tier.

A request's keys are sent from head to tail, in parts, each once the one before is answered. So no
probe is sent for keys that are of no use behind a missing one. Requests take turns (round-robin):
a short one does not wait for all keys of a long one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import structs

from kvtier.core import messages as m
from kvtier.core import wire
from kvtier.engine.link.flights import Flight

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvtier.plugin_api.keys import Key, RequestId


class Probe(Flight):
    """Some keys of one request, sent to a tier in one message."""

    __slots__ = ("keys", "question", "since")

    def __init__(
        self, keys: tuple[Key, ...], request: RequestId, since: int, question: Question
    ) -> None:
        """``since``: the epoch in which its generation began."""
        self.keys = keys
        self.since = since
        self.question = question  #: the question that it is a part of
        super().__init__(request, len(keys))

    def order(self, mark: bytes) -> wire.Probe:
        """Return the message for the tier, once the probe has begun."""
        return wire.Probe(self.number, self.keys, mark, self.since, self.request, self.deadline)


class Question:
    """The keys that one request has probed for; those from ``start`` on are unsent."""

    __slots__ = ("_message", "_start", "asked_at", "is_at_tier", "since")

    def __init__(self, message: m.ProbeKeys, since: int, now: float) -> None:
        self._message = message
        self._start = 0
        self.since = since  # the epoch in which the generation began
        self.asked_at = now
        self.is_at_tier = False  # whether a part of it is

    @property
    def asker(self) -> RequestId:
        """The request that waits for the answer."""
        return self._message.asker

    @property
    def request(self) -> RequestId:
        """The same, if the tier answers each request separately; else empty."""
        return self._message.request

    @property
    def is_apart(self) -> bool:
        """Whether the tier answers this request separately."""
        return bool(self.request)

    @property
    def in_order(self) -> bool:
        """Whether no key is of use behind a missing one."""
        return self._message.in_order

    @property
    def is_asked(self) -> bool:
        """Whether all its keys were sent."""
        return self._start == len(self._message.keys)

    @property
    def keys(self) -> tuple[Key, ...]:
        """The unsent keys."""
        return self._message.keys[self._start :]

    def pop(self, keys_max: int | None = None) -> Probe:
        """Return the next part, of up to ``keys_max`` keys, or of all that are left."""
        keys = self.keys[:keys_max]
        self._start += len(keys)
        return Probe(keys, self.request, self.since, self)

    def drop(self, unwanted: frozenset[Key]) -> tuple[Key, ...]:
        """Forget unsent keys that are unwanted; return them."""
        dropped = tuple(key for key in self.keys if key in unwanted)
        kept = tuple(key for key in self.keys if key not in unwanted)
        self._message, self._start = structs.replace(self._message, keys=kept), 0
        return dropped


class WaitingProbes:
    """The waiting probes of one tier."""

    def __init__(self) -> None:
        self._questions: dict[RequestId, list[Question]] = {}  # in the order of their turns

    def __len__(self) -> int:
        """Return how many requests wait for an answer."""
        return len(self._questions)

    def unasked(self) -> int:
        """Return how many questions have unsent keys."""
        return sum(not each.is_asked for few in self._questions.values() for each in few)

    def add(self, message: m.ProbeKeys, since: int, now: float) -> None:
        """Queue a request's question, behind its earlier ones."""
        if message.keys:
            question = Question(message, since, now)
            self._questions.setdefault(message.asker, []).append(question)

    def next(self) -> Question | None:
        """Return the next question to send; None: none, or all wait for an answer first."""
        return next((few[0] for few in self._questions.values() if not few[0].is_at_tier), None)

    def pop_part(self, question: Question, keys_max: int | None) -> Probe:
        """Return the next part of a question, or all its unsent keys; its request's turn ends."""
        question.is_at_tier = True
        self._questions[question.asker] = self._questions.pop(question.asker)
        return question.pop(keys_max)

    def answered(self, probe: Probe, *, is_whole: bool) -> Probe | None:
        """Note that a part was answered. ``is_whole``: the tier has all its keys.

        Returns the rest of the question if that will not be sent because of it.
        """
        question = probe.question
        if question not in self._questions.get(question.asker, ()):
            return None  # no request waits for the rest
        question.is_at_tier = False
        if not question.is_asked and (is_whole or not question.in_order):
            return None
        self._remove(question)
        return None if question.is_asked else question.pop()

    def pop_unwanted(
        self, asker: RequestId, unwanted: frozenset[Key]
    ) -> Iterator[tuple[RequestId, tuple[Key, ...]]]:
        """Drop a request's unsent keys that are unwanted; yield ``Question.request`` with them."""
        for question in list(self._questions.get(asker, ())):
            dropped = question.drop(unwanted)
            if question.is_asked:
                self._remove(question)
            if dropped:
                yield question.request, dropped

    def pop_impatient(self, since: float) -> list[Probe]:
        """Drop the questions from ``since`` or before; return their unsent keys."""
        return self._pop_where(lambda question: question.asked_at <= since)

    def pop_all(self) -> list[Probe]:
        """Drop all questions; return their unsent keys."""
        return self._pop_where(lambda _: True)

    def _pop_where(self, is_meant: Callable[[Question], bool]) -> list[Probe]:
        """Drop questions; return their unsent keys."""
        found = [each for few in self._questions.values() for each in few if is_meant(each)]
        for question in found:
            self._remove(question)
        return [question.pop() for question in found if not question.is_asked]

    def _remove(self, question: Question) -> None:
        questions = self._questions[question.asker]
        questions.remove(question)
        if not questions:
            del self._questions[question.asker]
