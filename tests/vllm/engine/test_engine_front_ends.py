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


def starts(model: str, transfer: dict[str, Any] | None) -> dict[str, bool]:
    """Make an engine's configuration, as ``LLM(...)`` does; return what has been done by then.

    A dead engine's region lies in a folder of its own: what lies in /dev/shm, an engine of another
    test may sweep.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.input_processor import InputProcessor

    from kvtier.vllm.memory import region

    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        region.sweep = partial(region.sweep, folder)
        left = Path(folder) / region.VLLMS_NAME.format("left")
        left.write_bytes(b"x")
        EngineArgs(model=model, kv_transfer_config=transfer).create_engine_config()
        marks = hasattr(InputProcessor.process_inputs, "__wrapped__")
        return {"marks media": marks, "sweeps": not left.exists()}


@pytest.mark.parametrize("has_kvtier", [True, False])
def test_a_front_end_marks_media_and_sweeps_vllms_regions_if_its_engine_has_kvtier(
    llama: Path, log_folder: Path, has_kvtier: bool
) -> None:
    """``LLM(...)`` has no statistics by default, by which kvtier used to get there.

    All media stayed in host memory then. Ranks on devices sweep nothing: one could take away what
    another has just found and opened.
    """
    told = run_scenario(
        starts,
        log_folder=log_folder,
        model=str(llama),
        transfer=TRANSFER if has_kvtier else None,
    )
    assert told == {"marks media": has_kvtier, "sweeps": has_kvtier}


def refusals(llama: str, whisper: str) -> list[str]:
    """Make configurations of engines here; return what each is refused for."""
    from vllm.engine.arg_utils import EngineArgs

    too_much = {
        **TRANSFER,
        "kv_connector_extra_config": kvtier_config(cpu_bytes_to_use="900TiB"),
    }
    told = []
    for model, transfer, engines in ((llama, too_much, 2), (whisper, TRANSFER, 1)):
        arguments = EngineArgs(
            model=model,
            kv_transfer_config=transfer,
            data_parallel_size=engines,
            skip_tokenizer_init=True,
        )
        try:
            arguments.create_engine_config()
            told.append("none")
        except ValueError as refusal:
            told.append(str(refusal))
    return told


def test_a_front_end_refuses_engines_before_a_model_is_loaded(
    llama: Path, tmp_path: Path, log_folder: Path
) -> None:
    """Workers would refuse an engine without memory too, after minutes.

    vLLM asserts that it has no connector for a model, without a word on it or the remedy.
    """
    memory, whisper = run_scenario(
        refusals,
        log_folder=log_folder,
        llama=str(llama),
        whisper=str(make_whisper(tmp_path / "model")),
    )
    assert "cpu_bytes_to_use='900TiB' for each of data-parallel ranks 0, 1" in memory
    assert "Lower it" in memory
    assert "WhisperForConditionalGeneration" in whisper
    assert "Remove kv_transfer_config" in whisper
