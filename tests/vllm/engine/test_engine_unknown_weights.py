"""A loader does not say where its weights are from: a name for them is all that tells them."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest

from tests.vllm.support.children import run_scenario
from tests.vllm.support.play import whole_blocks
from tests.vllm.support.weights import fine_tune, start_and_play, tokens_without_kvtier

if TYPE_CHECKING:
    from pathlib import Path

LENGTHS = [300, 417]  #: in tokens
LOAD_FORMAT = "stream-of-a-test"
WARNING = "nothing tells this model's weights from others"


def stream_from(source: dict[str, str]) -> None:
    """Register a loader, as a plugin of vLLM does, that brings what ``source`` has at the time."""
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    @register_model_loader(LOAD_FORMAT)
    class Streaming(DefaultModelLoader):
        def __init__(self, _load_config: LoadConfig) -> None:
            super().__init__(LoadConfig())

        def _prepare_weights(self, _model: str, *others: Any, **named: Any) -> Any:
            return super()._prepare_weights(source["folder"], *others, **named)


def streamed(model: str, one: str, other: str, root: str) -> dict[str, Any]:
    """Start engines one after the other; ``model`` has what ``one`` has, and is not read."""
    source: dict[str, str] = {}
    stream_from(source)
    told: dict[str, Any] = {}

    def start(name: str, folder: str, rounds: int = 1, **keys: Any) -> None:
        source["folder"] = folder
        print(f"== {name}", flush=True)
        told[name] = start_and_play(
            model, root, LENGTHS, rounds, keys=keys, load_format=LOAD_FORMAT
        )

    start("unnamed", one, rounds=2)
    start("restarted", one)
    start("changed", other)
    start("named", one, weights_version="step-1")
    start("named again", one, weights_version="step-1")
    start("next name", other, weights_version="step-2")
    for folder in (one, other):
        told[folder] = tokens_without_kvtier(folder, LENGTHS)
    return told


def warning_in(text: str) -> str:
    return "".join(line for line in text.splitlines() if WARNING in line)


@pytest.mark.one_release
@pytest.mark.long
def test_streamed_weights_are_found_again_by_their_name_alone(
    llama: Path, tmp_path: Path, log_folder: Path
) -> None:
    """Files lie at the model's path that tell nothing of what the loader has brought."""
    model, other = tmp_path / "model", tmp_path / "other"
    for folder in (model, other):
        shutil.copytree(llama, folder)
    (file,) = llama.glob("*.safetensors")
    fine_tune(file, other / file.name, seed=1)
    told = run_scenario(
        streamed,
        log_folder=log_folder,
        model=str(model),
        one=str(llama),
        other=str(other),
        root=str(tmp_path),
    )
    plain, changed = told[str(llama)], told[str(other)]
    assert plain != changed
    whole = whole_blocks(LENGTHS)
    for name, tokens, cached in (
        ("unnamed", plain, [[0, 0], whole]),  # what it has stored itself, it finds
        ("restarted", plain, [[0, 0]]),
        ("changed", changed, [[0, 0]]),
        ("named", plain, [[0, 0]]),
        ("named again", plain, [whole]),
        ("next name", changed, [[0, 0]]),
    ):
        assert [each["cached"] for each in told[name]] == cached, name
        assert all(each["tokens"] == tokens for each in told[name]), name
    (disk, _fs) = told["named again"][0]["statistics"]["tiers"]
    assert disk["counts"]["read_bytes"] > 0, "it looked there in time"
    (log,) = log_folder.glob("*.log")
    engines = log.read_text(errors="replace").split("== ")[1:]
    warned = {text.partition("\n")[0]: warning_in(text) for text in engines}
    for name in ("unnamed", "restarted", "changed"):
        assert LOAD_FORMAT in warned[name]
        assert "1:disk, 2:fs" in warned[name]
        assert "weights_version" in warned[name]
    assert not any(warned[name] for name in ("named", "named again", "next name"))
