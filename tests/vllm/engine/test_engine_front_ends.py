"""kvtier in a front end of vLLM's that has no statistics."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.support.children import run_scenario
from tests.vllm.support.engine import kvtier_config
from tests.vllm.support.models import make_whisper

pytestmark = pytest.mark.slow

TRANSFER = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": kvtier_config(),
}


def marks_media(model: str, transfer: dict[str, Any] | None) -> bool:
    """Make an engine's configuration, as ``LLM(...)`` does; return whether media are marked."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.input_processor import InputProcessor

    EngineArgs(model=model, kv_transfer_config=transfer).create_engine_config()
    return hasattr(InputProcessor.process_inputs, "__wrapped__")


@pytest.mark.parametrize("has_kvtier", [True, False])
def test_a_front_end_marks_media_if_its_engine_has_kvtier(
    llama: Path, log_folder: Path, has_kvtier: bool
) -> None:
    """``LLM(...)`` has no statistics by default, by which kvtier used to get there.

    All media stayed in host memory then.
    """
    told = run_scenario(
        marks_media,
        log_folder=log_folder,
        model=str(llama),
        transfer=TRANSFER if has_kvtier else None,
    )
    assert told is has_kvtier


def sweeps_what_is_left(model: str, transfer: dict[str, Any] | None) -> bool:
    """Make an engine's configuration; return whether a dead engine's region is gone by then.

    In a folder of its own: what lies in /dev/shm, an engine of another test may sweep.
    """
    from vllm.engine.arg_utils import EngineArgs

    from kvtier.vllm.memory import region

    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        region.sweep = partial(region.sweep, folder)
        left = Path(folder) / region.VLLMS_NAME.format("left")
        left.write_bytes(b"x")
        EngineArgs(model=model, kv_transfer_config=transfer).create_engine_config()
        return not left.exists()


@pytest.mark.parametrize("has_kvtier", [True, False])
def test_a_front_end_sweeps_vllms_regions_before_its_engine_starts(
    llama: Path, log_folder: Path, has_kvtier: bool
) -> None:
    """Ranks on devices do not: one could take away what another has just found and opened."""
    swept = run_scenario(
        sweeps_what_is_left,
        log_folder=log_folder,
        model=str(llama),
        transfer=TRANSFER if has_kvtier else None,
    )
    assert swept is has_kvtier


def refusal_of(model: str, transfer: dict[str, Any], engines: int = 2) -> str:
    """Make the configuration of engines here; return what they are refused for."""
    from vllm.engine.arg_utils import EngineArgs

    arguments = EngineArgs(
        model=model,
        kv_transfer_config=transfer,
        data_parallel_size=engines,
        skip_tokenizer_init=True,
    )
    try:
        arguments.create_engine_config()
    except ValueError as refusal:
        return str(refusal)
    return ""


def test_a_front_end_refuses_engines_without_memory_before_a_model_is_loaded(
    llama: Path, log_folder: Path
) -> None:
    """An engine alone would be refused too, but by its workers, after minutes."""
    told = run_scenario(
        refusal_of,
        log_folder=log_folder,
        model=str(llama),
        transfer={
            **TRANSFER,
            "kv_connector_extra_config": kvtier_config(cpu_bytes_to_use="900TiB"),
        },
    )
    assert "cpu_bytes_to_use='900TiB' for each of data-parallel ranks 0, 1" in told
    assert "Lower it" in told


def test_a_front_end_refuses_a_model_that_vllm_has_no_connectors_for_before_it_is_loaded(
    tmp_path: Path, log_folder: Path
) -> None:
    """vLLM asserts it, without a word on the model or the remedy, once the model is loaded."""
    told = run_scenario(
        refusal_of,
        log_folder=log_folder,
        model=str(make_whisper(tmp_path / "model")),
        transfer=TRANSFER,
        engines=1,
    )
    assert "WhisperForConditionalGeneration" in told
    assert "Remove kv_transfer_config" in told
