"""Detects weight changes in a running engine, whether or not the connector is reset for them.

When a trainer pushes weights into an engine, KV data of the old ones must not be used any more.
vLLM leaves it to the trainer to reset its caches, and few trainers reset the connector, or in the
right order. So a change is *heard* if it passes a method of vLLM's engine core; otherwise it is
*found*, by samples of the weights (``identity/weight_sample.py``). Either way the connector is
reset before the next step is scheduled, and a generation begins that no other engine is in.

Rules:

- All heard calls and samples are decided on once, at the beginning of the next step: chunks of an
  update, a reset before them and a version after them are one change. Nothing is looked up or
  stored in between, because the engine's core is one thread. This also ensures that vLLM's
  connector is not reset twice between two steps, which it treats as an error.
- A call that writes weights is a change, whatever the samples show. A call that can't write is
  not. For all others (functions, methods of worker extensions) the samples decide: most are
  getters, and a reset at each would cost the cache. A method named after weights counts as writing.
- Samples are compared after a reset of any kind, after such a call, and when a request arrives at
  an engine that has none; not at each step, because they cost up to a millisecond.
- A new generation has a name if ``set_weight_version`` gives one. Its mark is made from the name
  and the samples: "3" of one run and "3" of another differ, and engines that were given the same
  weights under the same name share. Without samples it has no name.
- Weights that cannot be read (no samples) count as changed after a reset of any kind.
- Nothing here raises into the engine. A failed decision is tried again before the next step.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from weakref import WeakMethod, ref

from vllm.v1.engine.core import EngineCore

from kvtier.plugin_api.log import log
from kvtier.settings.weight_sources import NO_WEIGHTS
from kvtier.vllm.identity.own_spec import callers
from kvtier.vllm.identity.weight_sample import DIGEST_BYTES, sample_weights
from kvtier.vllm.identity.weights import why_unknown
from kvtier.vllm.workarounds.hooking import once_a_process

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvtier.settings.runtime_config import RuntimeConfig

_KEEP_WEIGHTS: Final = frozenset(
    {
        *("add_lora", "list_loras", "pin_lora", "remove_lora"),
        *("annotate_profile", "profile", "check_health", "compute_weight_checksums"),
        *("execute_dummy_batch", "execute_model", "sample_tokens", "take_draft_token_ids"),
        *("init_weight_transfer_engine", "shutdown_weight_transfer_engine"),
        *("release_late_interaction_query_cache", "reset_encoder_cache", "reset_mm_cache"),
        *("save_sharded_state", "save_tensorized_model", "supports_draft_weight_updates"),
        *("synchronize_device", "update_max_model_len", "determine_available_memory"),
    }
)
"""Methods of vLLM's workers that at most read weights, besides those that begin with ``get_``."""

_WRITE_WEIGHTS: Final = frozenset(
    {
        *("load_model", "elastic_ep_execute", "checkpoint_restore", "handle_ft_command"),
        *("sleep", "wake_up", "discard", "init_device", "initialize_from_config"),
    }
)
"""Methods of vLLM's workers that may change weights although their names don't show it."""

_WORDS: Final = ("weight", "param", "state_dict", "load")
"""A method with one of these in its name counts as writing, in any class: ``update_weights``,
``reload_weights``, ``finish_weight_update``, ``load_checkpoint``, ``update_named_param``."""

_DISCARDS_WEIGHTS: Final = 2
"""vLLM's level of sleep from which on an engine must get its weights again."""


def may_write(method: Any) -> bool | None:  # noqa: ANN401 - a name, or anything that can be called
    """Return whether a call on all workers writes weights; None: the samples decide."""
    if not isinstance(method, str):
        return None
    if method in _KEEP_WEIGHTS or method.startswith("get_"):
        return False
    if method in _WRITE_WEIGHTS or any(word in method for word in _WORDS):
        return True
    return None


class Update(NamedTuple):
    """A change of weights, for the objects that keep KV data."""

    is_certain: bool = True
    name: str = ""  #: of the new weights, if the engine was given one
    sample: str = ""  #: of the new weights; empty: they can't be read
    is_first: bool = False  #: they replace random ones, with which nothing was computed

    def version(self, weights_version: str) -> str | None:
        """Return the name of the generation that begins; None: it has none.

        ``weights_version``: of the configuration. It names the first weights that an engine is
        given if it starts with random ones, which have no name.
        """
        name = self.name or (weights_version if self.is_first else "")
        return f"{name}\0{self.sample}" if name and self.sample else None


class EngineWeights:
    """State of one engine's weights. Used on the thread of its core only.

    ``update``: the change for which the connector is being reset; None in every other reset.
    """

    def __init__(self, engine: EngineCore | None, worker_facts: Mapping[str, Any]) -> None:
        """``engine``: None if a manager belongs to no vLLM engine: then nothing is detected."""
        self.update: Update | None = None
        self.is_due = False  # a decision is due before the next step
        self.has_computed = False  # since vLLM's own prefix cache was empty
        self.gpu_is_stale = False  # vLLM's own prefix cache has KV data of older weights
        self._engine = None if engine is None else ref(engine)
        self._was_random = worker_facts.get("weights_load_format") == NO_WEIGHTS
        self._is_named = why_unknown(worker_facts) is None
        self._listeners: list[WeakMethod[Callable[[], None]]] = []
        self._heard = ""  # the call that has changed the weights
        self._name = ""  # their name, if given since
        self._was_reset = False
        self._has_stepped = False  # since the connector was reset
        self._has_failed = False
        self._sample: bytes | None = None
        with suppress(Exception):  # the engine starts without a sample
            self._sample = self._look()

    def add(
        self, reset_cache: Callable[[], None], reset: Callable[..., None], config: RuntimeConfig
    ) -> Callable[[], None]:
        """Register an object that keeps KV data. Return its function that begins a generation.

        ``reset_cache``: its method that vLLM's connector, or this class, calls in a reset.
        ``reset``: its facade's method. ``config``: the facade's configuration.
        """
        self._listeners.append(WeakMethod(reset_cache))
        return partial(self._begin_generation, reset, config)

    # --- notifications ---

    def on_change(self, what: str) -> None:
        """Note that the weights have changed, or are about to."""
        self._heard = self._heard or what
        self.is_due = True

    def on_version(self, name: str) -> None:
        """Note that the engine's present weights have a name."""
        self._name = name
        self.is_due = True

    def on_first_request(self) -> None:
        """Note that a request has arrived at an engine that had none."""
        self.is_due = True

    def on_step(self) -> None:
        """Note that vLLM's connector has sent its workers a step's work."""
        self._has_stepped = True

    def on_reset(self, *, is_empty: bool, of_connector: bool) -> None:
        """Note that vLLM's own prefix cache was reset. ``is_empty``: nothing is left in it."""
        if is_empty:
            self.has_computed = self.gpu_is_stale = False
        elif of_connector and not self._is_named:
            self.gpu_is_stale = True
        self._was_reset = self._was_reset or not of_connector
        self.is_due = True

    def _begin_generation(self, reset: Callable[..., None], config: RuntimeConfig) -> None:
        self._has_stepped = False
        if self.update is None:
            reset()
            self._is_named = self._is_named and config.keeps_on_reset
        else:
            version = self.update.version(config.weights_version)
            reset(weights_version=version, weights_changed=self.update.is_certain)

    # --- before a step ---

    def before_step(self) -> None:
        """Decide whether the weights have changed. Never raises."""
        self.is_due = False
        try:
            self._decide()
        except Exception:  # noqa: BLE001 - the engine must go on
            self.is_due = True
            if not self._has_failed:
                self._has_failed = True
                log.error("a change of weights could not be handled", exc_info=True)

    def _decide(self) -> None:
        sample = self._look()
        has_changed = bool(self._heard) or self._is_other(sample)
        if has_changed or (self._name and sample and not self._is_named):
            update = Update(
                is_certain=bool(self._heard or sample),
                name=self._name,
                sample="" if sample is None else sample.hex(),
                is_first=self._was_random,
            )
            if has_changed:
                log.info(
                    "the weights have changed: KV data of the old ones is not used any more",
                    noticed_by=self._heard or ("samples" if sample else "a reset"),
                    name=self._name or None,
                )
            self._reset(update)
            self.gpu_is_stale = self.gpu_is_stale or (has_changed and self.has_computed)
            self._is_named = bool(update.name and update.sample)
        self._sample = sample or (None if has_changed else self._sample)
        self._heard, self._name, self._was_reset = "", "", False

    def _is_other(self, sample: bytes | None) -> bool:
        if sample is None:
            return self._was_reset
        return sample != self._sample

    def _reset(self, update: Update) -> None:
        engine = None if self._engine is None else self._engine()
        self.update = update
        try:
            if engine is not None and self._has_stepped:
                engine.scheduler.get_kv_connector().reset_cache()
            else:  # vLLM's connector has nothing in flight, and accepts no second reset
                for each in self._listeners:
                    reset = each()
                    if reset is not None:
                        reset()
        finally:
            self.update = None

    def _look(self) -> bytes | None:
        """Return a digest of all workers' samples; None if one of them has none."""
        engine = None if self._engine is None else self._engine()
        if engine is None or not _may_look(engine):
            return None
        samples = engine.model_executor.collective_rpc(sample_weights)
        if not all(isinstance(each, bytes) and len(each) == DIGEST_BYTES for each in samples):
            return None
        return hashlib.blake2b(b"".join(samples), digest_size=DIGEST_BYTES).digest()

    def note_computed(self) -> None:
        """Note that a step has computed something."""
        self.has_computed = True
        self._was_random = False


def _may_look(engine: EngineCore) -> bool:
    """Return whether all workers can be queried between two steps, without delay."""
    executor, ranks = engine.model_executor, engine.vllm_config.parallel_config
    # Each rank then has its own scheduler: each would decide by its own samples, and not alike.
    is_one_of_several = (
        ranks.distributed_executor_backend == "external_launcher" and ranks.world_size > 1
    )
    return not (
        is_one_of_several
        or executor.is_sleeping  # the memory of the weights is not mapped
        or executor.uses_ray  # a call takes milliseconds
    )


def weights_here(worker_facts: Mapping[str, Any]) -> EngineWeights:
    """Return the state of the weights of the engine that is being built in this thread.

    All managers and tiers of an engine share it. ``worker_facts``: of the namespace.
    """
    engine = _engine_here()
    known: EngineWeights | None = getattr(engine, "kvtier_weights", None)
    if known is None:
        known = EngineWeights(engine, worker_facts)
        if engine is not None:
            engine.kvtier_weights = known
            hear_updates()
    return known


def _engine_here() -> EngineCore | None:
    """Return the engine whose ``__init__`` leads here: its workers have their weights already."""
    for frame in callers():
        found = frame.f_locals.get("self")
        if isinstance(found, EngineCore):
            return found
    return None


@once_a_process
def hear_updates() -> None:
    """Wrap the methods that change weights in this process's vLLM. Once a process; any thread."""
    EngineCore.step = _deciding_before(EngineCore.step)
    EngineCore.step_with_batch_queue = _deciding_before(EngineCore.step_with_batch_queue)
    EngineCore.collective_rpc = _hearing_calls(EngineCore.collective_rpc)
    EngineCore.reset_prefix_cache = _hearing_resets(EngineCore.reset_prefix_cache)
    EngineCore.set_weight_version = _hearing_names(EngineCore.set_weight_version)
    EngineCore.sleep = _hearing_sleep(EngineCore.sleep)


def _deciding_before(real: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @wraps(real)
    def step(engine: EngineCore) -> Any:  # noqa: ANN401 - vLLM has no stubs
        weights: EngineWeights | None = getattr(engine, "kvtier_weights", None)
        if weights is None:
            return real(engine)
        # Without a request nothing is computed or looked up, and the weights may be off the GPU.
        if weights.is_due and engine.scheduler.has_unfinished_requests():
            weights.before_step()
        stepped = real(engine)
        if stepped[1]:
            weights.note_computed()
        return stepped

    return step


def _hearing_calls(real: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(real)
    def collective_rpc(
        engine: EngineCore,
        method: Any,  # noqa: ANN401 - a name, or anything that can be called
        *rest: Any,  # noqa: ANN401 - vLLM has no stubs
        **named: Any,  # noqa: ANN401 - as above
    ) -> Any:  # noqa: ANN401 - as above
        weights: EngineWeights | None = getattr(engine, "kvtier_weights", None)
        writes = may_write(method)
        if weights is None or writes is False:
            return real(engine, method, *rest, **named)
        try:
            result = real(engine, method, *rest, **named)
        except BaseException:
            # Some may be written. Workers are not queried: some may not have replied to this call.
            weights.on_change(_name_of(method))
            raise
        if writes:
            weights.on_change(_name_of(method))
        else:
            weights.is_due = True
        return result

    return collective_rpc


def _name_of(method: Any) -> str:  # noqa: ANN401 - as above
    return method if isinstance(method, str) else str(getattr(method, "__qualname__", "a function"))


def _hearing_resets(real: Callable[..., bool]) -> Callable[..., bool]:
    @wraps(real)
    def reset_prefix_cache(
        engine: EngineCore,
        reset_running_requests: bool = False,  # noqa: FBT001, FBT002 - vLLM's signature
        reset_connector: bool = False,  # noqa: FBT001, FBT002 - as above
    ) -> bool:
        is_reset = real(engine, reset_running_requests, reset_connector)
        weights: EngineWeights | None = getattr(engine, "kvtier_weights", None)
        if weights is not None:
            weights.on_reset(is_empty=bool(is_reset), of_connector=reset_connector)
        return is_reset

    return reset_prefix_cache


def _hearing_names(real: Callable[[Any, str], None]) -> Callable[[Any, str], None]:
    @wraps(real)
    def set_weight_version(engine: EngineCore, weight_version: str) -> None:
        real(engine, weight_version)
        weights: EngineWeights | None = getattr(engine, "kvtier_weights", None)
        if weights is not None:
            weights.on_version(str(weight_version))

    return set_weight_version


def _hearing_sleep(real: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(real)
    def sleep(engine: EngineCore, level: int = 1, *rest: Any, **named: Any) -> Any:  # noqa: ANN401
        weights: EngineWeights | None = getattr(engine, "kvtier_weights", None)
        if weights is not None and level >= _DISCARDS_WEIGHTS:
            weights.on_change("sleep")
        return real(engine, level, *rest, **named)

    return sleep
