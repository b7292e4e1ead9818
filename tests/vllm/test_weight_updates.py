"""When an engine's weights count as changed, and what is begun then, without an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.engine.core import EngineCore

from kvtier.settings.extra_config import read_settings
from kvtier.vllm.identity.weight_sample import DIGEST_BYTES, PARAMETERS_MAX, sample_weights
from kvtier.vllm.identity.weight_updates import (
    EngineWeights,
    Update,
    _deciding_before,
    _hearing_calls,
    _hearing_names,
    _hearing_resets,
    _hearing_sleep,
    may_write,
)
from kvtier.vllm.scheduler.requests import EngineRequests

FIRST, SECOND = b"1" * DIGEST_BYTES, b"2" * DIGEST_BYTES
CONFIG = read_settings({"weights_version": "run"}, slot_count=8, block_bytes=1)
KEEPING = read_settings({"on_reset": "keep"}, slot_count=8, block_bytes=1)


class Connector:
    """vLLM's connector: its reset reaches the manager."""

    def __init__(self) -> None:
        self.manager: Any = None
        self.resets = 0

    def reset_cache(self) -> bool:
        self.resets += 1
        self.manager.reset()
        return True


class Engine:
    """An engine's core, with the calls that are wrapped."""

    def __init__(self, *, facts: dict[str, Any] | None = None, **parallel: Any) -> None:
        ranks = {"distributed_executor_backend": "uni", "world_size": 1, **parallel}
        self.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(**ranks))
        self.samples: list[Any] = [FIRST]
        self.looks = 0
        self.computes, self.has_requests, self.empties, self.refuses = True, True, True, False
        self.model_executor = SimpleNamespace(
            is_sleeping=False, uses_ray=False, collective_rpc=self._look
        )
        self.connector = Connector()
        self.scheduler = SimpleNamespace(
            get_kv_connector=lambda: self.connector,
            has_unfinished_requests=lambda: self.has_requests,
        )
        self.weights = EngineWeights(self, facts or {})  # type: ignore[arg-type]
        self.kvtier_weights = self.weights

    def _look(self, call: Any) -> list[Any]:
        assert call is sample_weights
        self.looks += 1
        return self.samples

    @_deciding_before
    def step(self) -> tuple[None, bool]:
        self.weights.on_step()
        return None, self.computes

    @_hearing_calls
    def collective_rpc(self, method: Any, *_rest: Any) -> str:
        if self.refuses:
            raise RuntimeError(method)
        return "told"

    @_hearing_resets
    def reset_prefix_cache(self, _running: bool = False, reset_connector: bool = False) -> bool:
        if reset_connector:
            self.connector.reset_cache()
        return self.empties

    @_hearing_names
    def set_weight_version(self, weight_version: str) -> None:
        pass

    @_hearing_sleep
    def discard(self, level: int = 1) -> None:
        pass


class Manager:
    """What keeps KV data. ``begun``: the arguments of each reset of its facade."""

    def __init__(self, engine: Engine, config: Any = CONFIG) -> None:
        self.begun: list[dict[str, Any]] = []
        self._begin = engine.weights.add(self.reset, self._note, config)
        engine.connector.manager = self

    def reset(self) -> None:
        self._begin()

    def _note(self, **given: Any) -> None:
        self.begun.append(given)

    def took(self) -> list[dict[str, Any]]:
        begun, self.begun = self.begun, []
        return begun


UNNAMED = {"weights_version": None, "weights_changed": True}


def started(config: Any = CONFIG, **settings: Any) -> tuple[Engine, Manager]:
    engine = Engine(**settings)
    manager = Manager(engine, config)
    engine.step()
    assert manager.took() == []
    return engine, manager


# --- what is heard ---


@pytest.mark.parametrize(
    ("method", "writes"),
    [
        *((name, False) for name in ("get_model", "get_anything", "add_lora", "profile")),
        *((name, False) for name in ("check_health", "compute_weight_checksums")),
        *((name, False) for name in ("init_weight_transfer_engine", "save_sharded_state")),
        *((name, True) for name in ("update_weights", "reload_weights", "finish_weight_update")),
        *((name, True) for name in ("start_draft_weight_update", "reset_weights", "load_model")),
        *((name, True) for name in ("update_weights_from_ipc", "update_named_param", "wake_up")),
        *((name, None) for name in ("apply_model", "report_device_id", len)),
    ],
)
def test_a_call_writes_by_its_name_or_samples_say(method: Any, writes: bool | None) -> None:
    assert may_write(method) is writes


@pytest.mark.parametrize("release_method", sorted(dir(EngineCore)))
def test_what_is_wrapped_is_there(release_method: str) -> None:
    """Each name is a method of vLLM's, and none has other names of the same purpose."""
    if "weight" in release_method:
        known = ("set_weight_version", "get_weight_version", "compute_weight_checksums")
        assert release_method in known or release_method.startswith("_")


def test_an_update_in_chunks_is_one_change() -> None:
    engine, manager = started()
    for method in ("start_weight_update", "update_weights", "update_weights"):
        assert engine.collective_rpc(method) == "told"
    assert manager.took() == []
    engine.step()
    engine.step()
    assert manager.took() == [UNNAMED]
    assert engine.connector.resets == 1


def test_an_update_that_fails_is_one_too_and_still_fails() -> None:
    engine, manager = started()
    engine.refuses = True
    with pytest.raises(RuntimeError, match="apply_model"):
        engine.collective_rpc("apply_model")
    engine.step()
    assert manager.took() == [UNNAMED]


def test_a_getter_is_none_and_what_is_not_known_is_none_if_samples_are_the_same() -> None:
    engine, manager = started()
    engine.collective_rpc("get_model_inspection")
    looks = engine.looks
    engine.step()
    assert engine.looks == looks
    engine.collective_rpc("report_device_id")
    engine.step()
    assert engine.looks == looks + 1
    engine.samples = [SECOND]
    engine.step()
    assert manager.took() == [], "nothing is due"
    engine.collective_rpc(len)
    engine.step()
    assert manager.took() == [UNNAMED]


def test_sleep_that_discards_the_weights_is_one() -> None:
    engine, manager = started()
    engine.discard(1)
    engine.step()
    assert manager.took() == []
    engine.discard(level=2)
    engine.step()
    assert manager.took() == [UNNAMED]


def test_nothing_is_decided_while_there_is_no_request() -> None:
    """The weights may be anywhere, as far as vLLM is concerned: asleep, or half written."""
    engine, manager = started()
    engine.collective_rpc("update_weights")
    engine.has_requests = False
    engine.step()
    assert manager.took() == []
    engine.has_requests = True
    engine.step()
    assert manager.took() == [UNNAMED]


# --- resets ---


@pytest.mark.parametrize("resets_connector", [False, True])
def test_a_reset_finds_what_nobody_has_told(resets_connector: bool) -> None:
    engine, manager = started()
    engine.samples = [SECOND]
    engine.reset_prefix_cache(False, resets_connector)
    engine.step()
    engine.step()
    assert manager.took() == [{}] * resets_connector + [UNNAMED]
    assert engine.connector.resets == 1, "vLLM's connector takes no second one between two steps"


def test_a_reset_of_the_prefix_cache_alone_is_no_change_of_weights() -> None:
    engine, manager = started()
    engine.reset_prefix_cache()
    engine.step()
    assert manager.took() == []


def test_weights_that_come_after_a_reset_begin_another_generation() -> None:
    engine, manager = started()
    engine.reset_prefix_cache(reset_connector=True)
    engine.step()
    assert manager.took() == [{}]
    engine.collective_rpc("update_weights")
    engine.step()
    assert manager.took() == [UNNAMED]


def test_keep_does_not_hide_a_change_that_was_noticed() -> None:
    engine, manager = started(KEEPING)
    engine.reset_prefix_cache(reset_connector=True)
    engine.step()
    assert manager.took() == [{}]
    engine.samples = [SECOND]
    engine.weights.is_due = True
    engine.step()
    assert manager.took() == [UNNAMED]


@pytest.mark.parametrize("hidden", ["asleep", "ray", "launcher", "raises", "one of two"])
def test_weights_that_cannot_be_seen_are_others_after_a_reset(hidden: str) -> None:
    """TRL starts its workers by an external launcher, and resets vLLM's own prefix cache alone."""
    engine, manager = started(
        **{"distributed_executor_backend": "external_launcher", "world_size": 2}
        if hidden == "launcher"
        else {}
    )
    engine.model_executor.is_sleeping = hidden == "asleep"
    engine.model_executor.uses_ray = hidden == "ray"
    engine.samples = {"raises": [None], "one of two": [FIRST, None]}.get(hidden, [FIRST])
    engine.weights.is_due = True
    engine.step()
    assert manager.took() == [], "a request comes: nothing says that they are others"
    engine.reset_prefix_cache()
    engine.step()
    assert manager.took() == [{"weights_version": None, "weights_changed": False}]


def test_a_change_that_the_connector_does_not_take_is_tried_again() -> None:
    engine, manager = started()
    engine.collective_rpc("update_weights")
    engine.connector.manager = None
    engine.step()
    engine.step()
    engine.connector.manager = manager
    engine.step()
    assert manager.took() == [UNNAMED]


# --- names ---


def named(*parts: str) -> dict[str, Any]:
    return {"weights_version": "\0".join(parts), "weights_changed": True}


def test_a_name_goes_with_what_it_names() -> None:
    engine, manager = started()
    samples = []
    for sample in (FIRST, SECOND):
        engine.samples = [sample]
        engine.collective_rpc("update_weights")
        engine.set_weight_version("3")
        engine.step()
        (begun,) = manager.took()
        name, _, seen = begun["weights_version"].partition("\0")
        assert name == "3"
        samples.append(seen)
    assert samples[0] != samples[1]


def test_a_name_that_comes_before_the_weights_is_not_theirs() -> None:
    engine, manager = started()
    engine.set_weight_version("3")
    engine.step()
    assert manager.took() == [], "they have the name of their files"
    engine.collective_rpc("update_weights")
    engine.step()
    assert manager.took() == [UNNAMED]


def test_a_name_that_comes_later_begins_a_generation() -> None:
    engine, manager = started()
    engine.collective_rpc("update_weights")
    engine.step()
    engine.set_weight_version("3")
    engine.step()
    engine.set_weight_version("3")
    engine.step()
    unnamed, begun = manager.took()
    assert unnamed == UNNAMED
    assert begun["weights_version"].startswith("3\0")


def test_weights_that_cannot_be_seen_get_no_name() -> None:
    engine, manager = started()
    engine.model_executor.is_sleeping = True
    engine.collective_rpc("update_weights")
    engine.set_weight_version("3")
    engine.step()
    assert manager.took() == [UNNAMED]


def test_weights_version_is_the_name_of_what_replaces_random_ones() -> None:
    engine = Engine(facts={"weights_load_format": "dummy"})
    manager = Manager(engine)
    for _ in range(2):
        engine.collective_rpc("update_weights")
        engine.step()
    first, then = manager.took()
    assert first["weights_version"].startswith("run\0")
    assert then == UNNAMED


def test_a_version_has_a_name_and_samples_or_is_none() -> None:
    assert Update(sample="s").version("run") is None
    assert Update(name="3").version("run") is None
    assert Update(name="3", sample="s").version("run") == "3\0s"
    assert Update(sample="s", is_first=True).version("run") == "run\0s"
    assert Update(sample="s", is_first=True).version("") is None


# --- what may be stored ---


def test_what_begins_with_older_blocks_of_the_gpu_is_not_stored() -> None:
    engine, _manager = started()
    requests = EngineRequests(engine.weights, 16)
    requests.begin("before")
    requests.on_matched("before", 16)
    assert requests.may_store(requests.of("before")), "they are of the weights that it has"
    engine.collective_rpc("update_weights")
    engine.step()
    requests.reset()
    requests.begin("after")
    requests.begin("fresh")
    requests.on_matched("after", 16)
    assert [requests.may_store(requests.of(each)) for each in ("before", "after", "fresh")] == [
        0,
        0,
        1,
    ]
    requests.on_matched("before", 0)  # preempted: all of it is computed anew
    assert requests.may_store(requests.of("before"))
    engine.reset_prefix_cache()
    requests.begin("later")
    requests.on_matched("later", 16)
    assert requests.may_store(requests.of("later"))


def test_a_cache_that_was_emptied_before_the_update_is_not_stale() -> None:
    engine, _manager = started()
    engine.reset_prefix_cache()
    engine.collective_rpc("update_weights")
    engine.step()
    assert not engine.weights.gpu_is_stale


def test_a_reset_of_the_connector_leaves_a_stale_gpu_where_requests_run() -> None:
    engine, _manager = started()
    engine.empties = False
    engine.reset_prefix_cache(reset_connector=True)
    assert engine.weights.gpu_is_stale


def test_the_first_of_several_requests_has_the_weights_looked_at() -> None:
    engine, _manager = started()
    requests = EngineRequests(engine.weights, 16)
    for name in ("a", "b"):
        requests.begin(name)
        assert engine.weights.is_due is (name == "a")
        engine.weights.is_due = False


# --- samples ---


def worker(model: torch.nn.Module, **differs: Any) -> Any:
    settings = {
        "model_config": SimpleNamespace(enable_sleep_mode=False),
        "parallel_config": SimpleNamespace(enable_eplb=False),
        "speculative_config": None,
        "get_model": lambda: model,
    }
    return SimpleNamespace(**settings | differs)


def model_of(count: int = 3, seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(64, 64) for _ in range(count)]
    return torch.nn.Sequential(*layers, torch.nn.Linear(1, 1), torch.nn.ReLU())


@pytest.mark.parametrize("count", [1, PARAMETERS_MAX])
def test_a_sample_is_that_of_the_bytes_wherever_they_are(count: int) -> None:
    one, same, other = model_of(count), model_of(count), model_of(count, seed=1)
    digest = sample_weights(worker(one))
    assert digest is not None
    assert len(digest) == DIGEST_BYTES
    assert digest == sample_weights(worker(one)) == sample_weights(worker(same))
    assert digest != sample_weights(worker(other))
    one[0].weight.data += 1.0
    assert digest != sample_weights(worker(one))


def test_a_parameter_that_is_replaced_or_removed_is_seen() -> None:
    model = model_of()
    digests = {sample_weights(worker(model))}
    model[0].weight = torch.nn.Parameter(torch.zeros(64, 64, dtype=torch.bfloat16).t())
    digests.add(sample_weights(worker(model)))
    model[1].weight = torch.nn.Parameter(torch.empty(0))
    digests.add(sample_weights(worker(model)))
    model[2].weight = None
    digests.add(sample_weights(worker(model)))
    model[2] = torch.nn.Linear(64, 64)
    digests.add(sample_weights(worker(model)))
    assert None not in digests
    assert len(digests) == 5


def test_a_sample_keeps_no_weights_alive() -> None:
    """An update that replaces them would take twice their memory."""
    model = model_of()
    weight = model[0].weight
    storage = weight.untyped_storage()
    count = storage._use_count() if hasattr(storage, "_use_count") else None
    sample_weights(worker(model))
    assert count is None or storage._use_count() == count


def test_a_draft_has_weights_too() -> None:
    model, drafts = model_of(), [model_of(seed=1), model_of(seed=2), None]
    digests = {
        sample_weights(worker(model, speculative_config=1, get_draft_model=lambda each=each: each))
        for each in drafts
    }
    assert len(digests) == 3
    assert sample_weights(worker(model, speculative_config=1)) in digests, "a drafter without one"


def test_experts_that_vllm_moves_are_not_looked_at() -> None:
    model = torch.nn.ModuleDict({"experts": model_of(1), "gate": torch.nn.Linear(4, 4)})
    balancing = worker(model, parallel_config=SimpleNamespace(enable_eplb=True))
    before = sample_weights(balancing)
    model["experts"][0].weight.data += 1.0
    assert sample_weights(balancing) == before
    model["gate"].weight.data += 1.0
    assert sample_weights(balancing) != before


@pytest.mark.parametrize(("state", "is_seen"), [("RUNNING", True), ("SUSPENDED", False)])
def test_weights_that_may_be_unmapped_are_not_read(state: str, is_seen: bool) -> None:
    sleeper = worker(
        model_of(),
        model_config=SimpleNamespace(enable_sleep_mode=True),
        sleep_mode_backend=SimpleNamespace(state=lambda: state),
    )
    assert (sample_weights(sleeper) is not None) is is_seen


def test_it_raises_nothing() -> None:
    assert sample_weights(object()) is None
