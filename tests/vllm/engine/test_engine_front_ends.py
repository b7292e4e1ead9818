"""kvtier in a front end of vLLM's that has no statistics."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.vllm.support.children import run_scenario
from tests.vllm.support.engine import kvtier_config

if TYPE_CHECKING:
    from pathlib import Path

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
