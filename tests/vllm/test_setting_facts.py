"""All that vLLM can be told is looked at: it is in a block's name, or has a reason why not.

A release of vLLM that brings a setting, a variable or a field of a KV-cache spec fails here. Until
somebody has looked at it, such a setting tells engines apart by its value.
"""

from __future__ import annotations

import types
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any, get_args

import pytest
import torch
from vllm import envs
from vllm.config import MambaConfig, MultiModalConfig, VllmConfig
from vllm.v1 import kv_cache_interface
from vllm.v1.kv_cache_interface import KVCacheSpec

from kvtier.vllm.identity.page_facts import HARMLESS, OF_A_RANK, spec_facts
from kvtier.vllm.identity.plain_values import plain
from kvtier.vllm.identity.setting_facts import (
    FACT,
    WALKED,
    reason_for,
    reason_for_variable,
    setting_facts,
    settings_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

LOOKED_AT_ELSEWHERE = {"mamba_config": MambaConfig}  #: by ``page_facts.py``
TYPED_BY_NAME = {"multimodal_config": MultiModalConfig}


def settings_in(name: str, config: type) -> Iterator[tuple[str, str]]:
    """Yield the settings of a configuration, and of those in it that are looked at one by one."""
    for field in fields(config):
        yield name, field.name
        if reason_for(name, field.name) == WALKED:
            yield from settings_in(field.name, class_of(field))


def class_of(field: Any) -> type:
    kinds = [field.type, *get_args(field.type)]
    classes = [kind for kind in kinds if isinstance(kind, type) and is_dataclass(kind)]
    return classes[0] if classes else TYPED_BY_NAME[field.name]


def test_each_setting_of_vllm_is_in_the_name_or_has_a_reason_why_not() -> None:
    found = list(settings_in("vllm_config", VllmConfig))
    for name, config in LOOKED_AT_ELSEWHERE.items():
        found += settings_in(name, config)
    assert len(found) > 200
    assert [f"{name}.{field}" for name, field in found if reason_for(name, field) is None] == []


def test_each_variable_of_vllm_is_in_the_name_or_has_a_reason_why_not() -> None:
    assert [name for name in envs.environment_variables if reason_for_variable(name) is None] == []


def specs() -> list[type[KVCacheSpec]]:
    kinds = [each for each in vars(kv_cache_interface).values() if isinstance(each, type)]
    return [each for each in kinds if issubclass(each, KVCacheSpec)]


@pytest.mark.parametrize("kind", specs())
def test_each_field_of_a_spec_is_in_the_name_or_has_a_reason_why_not(kind: type) -> None:
    """So is one that is new in vLLM: what is left out is named, and all else is in."""

    def told(**values: Any) -> Any:
        spec = object.__new__(kind)
        for name in names:
            object.__setattr__(spec, name, values.get(name))
        return spec_facts(spec)

    names = [field.name for field in fields(kind)]
    for name in names:
        is_in = told(**{name: "otherwise"}) != told()
        assert is_in is (name not in HARMLESS), name


def test_what_is_left_out_of_specs_is_there() -> None:
    """A name that no spec has, in neither release, would be a field that has got another one."""
    known = {field.name for kind in specs() for field in fields(kind)}
    assert set(OF_A_RANK) <= known
    assert set(HARMLESS) - known <= {"is_draft"}  # new in vLLM 0.33


def test_settings_as_vllm_has_them_untold_are_not_spelt_out() -> None:
    """The release stands for them, and a description is for people to compare."""
    assert settings_of("mamba_config", MambaConfig()) == {}
    told = settings_of("mamba_config", MambaConfig(backend="flashinfer"))
    assert told == {"mamba_config.backend": "flashinfer"}


def test_what_nobody_has_looked_at_is_in_and_may_be_a_secret(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(envs.environment_variables, "VLLM_OF_TOMORROW", lambda: None)
    monkeypatch.setenv("VLLM_OF_TOMORROW", "password")
    told = setting_facts(types.SimpleNamespace(of_tomorrow="password"))
    assert {"vllm_config.of_tomorrow", "VLLM_OF_TOMORROW"} <= set(told)
    assert "password" not in str(told)


def test_a_variable_by_its_whole_name_comes_before_how_it_begins() -> None:
    assert reason_for_variable("VLLM_CPU_INT4_W4A8") == FACT
    assert reason_for_variable("VLLM_NIXL_SIDE_CHANNEL_PORT") != FACT


def test_values_are_the_same_text_in_every_process() -> None:
    assert plain({"b", "a", "c"}) == ["a", "b", "c"]
    assert plain([torch.float16, (1, None)]) == ["torch.float16", [1, None]]
    assert plain(object()) != plain(object())
