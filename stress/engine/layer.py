"""The engine layer: a real vLLM server with kvtier in it, its clients, and faults.

First a server without offloading answers every prompt, and stays, to judge answers that
begin with some weights and end with others. Then one with kvtier (a
small DRAM, a bounded ``disk`` tier and an ``fs`` tier; a KV cache of its own so
small that requests are preempted) serves clients that share prefixes, stream or
not, ask for several choices, and leave at random moments, while a plan's faults
are done to it. No request may fail but while the server is restarted, every token
must be the reference's, no counter may fall, and the server must live. Then the
faults stop, and after them the clients: everything comes back, and to rest.
Needs vLLM and aiohttp.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, ClassVar, Final

from stress.engine.clients import answer_all
from stress.engine.faults import ALONE_KINDS, KINDS
from stress.engine.places import Places
from stress.engine.processes import names_in_shared_memory
from stress.engine.questions import DOCUMENTS, make_questions
from stress.engine.referee import Referee
from stress.engine.resets import RESET, load_weights, post
from stress.engine.run import Run
from stress.engine.small_disk import small_disk
from stress.engine.vllm_server import ITS_OWN, make_model, server
from stress.engine.watch import TIERS
from stress.failure import Failure
from stress.layer import Layer

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from stress.arguments import Arguments
    from stress.engine.questions import Question
    from stress.engine.vllm_server import Server
    from stress.plan import Kind, Plan
    from stress.record import Record

CLIENTS: Final = 64
GATE_CLIENTS: Final = 12
GATE_DOCUMENTS: Final = 5


class EngineLayer(Layer):
    """A server whose tiers are harmed and which is restarted, and clients that are impatient."""

    name: ClassVar[str] = "engine"
    kinds: ClassVar[tuple[Kind, ...]] = KINDS
    not_in_the_gate: ClassVar[frozenset[str]] = frozenset(kind.name for kind in ALONE_KINDS)

    def __init__(self, arguments: Arguments) -> None:
        usual = GATE_CLIENTS if arguments.gate else CLIENTS
        self._clients = arguments.clients or usual

    def run(self, plan: Plan, record: Record, folder: Path) -> None:
        """Carry out a plan. Raises ``Failure``."""
        asyncio.run(soak(plan, record, folder, self._clients))


async def soak(plan: Plan, record: Record, folder: Path, clients: int) -> None:
    """Do all of it. Raises ``Failure``."""
    places = Places(folder, plan.seed, is_gate=plan.is_gate)
    for number, model in enumerate(places.models.values()):
        make_model(model, number)
    questions = make_questions(plan.seed, GATE_DOCUMENTS if plan.is_gate else DOCUMENTS)
    model, config = places.models[ITS_OWN], places.config(*TIERS)
    log = folder / "reference.log"
    async with AsyncExitStack() as stack:
        volume = stack.enter_context(small_disk(places.small))
        for aside in places.asides.values():
            aside.mkdir()
        places.config_file.write_text(json.dumps(config))
        # Side by side: to start one takes longer than all that it answers in the gate.
        reference = await stack.enter_async_context(server(model, None, log, places.engine_id))
        running = await stack.enter_async_context(
            server(model, config, places.log, places.engine_id)
        )
        await reference.wait_until_up()
        say(f"{len(questions)} prompts without offloading")
        await answer_all(reference, questions)
        if config["on_reset"] == "keep":
            await reference.stop()
        else:  # it stays, to judge answers of more than one kind of weights
            await answer_with_others(reference, places, questions)
        await running.wait_until_up()
        ends = "until counts are reached" if plan.is_gate else f"{plan.seconds / 60:g} minutes"
        say(f"{clients} clients, {ends}")
        referee = Referee(reference, places.models)
        run = Run(plan, record, places, running, questions, referee, volume=volume)
        await run.run(clients)
    left = names_in_shared_memory(places.engine_id)
    if left:
        raise Failure(f"left in shared memory: {left}")


async def answer_with_others(
    reference: Server, places: Places, questions: Sequence[Question]
) -> None:
    """Let it answer with the other weights too. Raises ``Failure`` if they are not others."""
    (others,) = set(places.models) - {ITS_OWN}
    await load_weights(reference, places.models, others)
    await post(reference, RESET)
    await answer_all(reference, questions)
    same = [q for q in questions if q.answers[others].tokens == q.answers[ITS_OWN].tokens]
    if same:
        raise Failure(f"{len(same)} prompts have the same answers with other weights")


def say(text: str) -> None:
    """Print at once."""
    print(f"stress: {text}", flush=True)
