"""What requests may ask for gives the same with kvtier: cold, from DRAM and after a restart.

The table of ``vllm-releases.md`` lists each of ``PLAYS``.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.vllm.support.children import run_scenario
from tests.vllm.support.engine import Engine, engine, greedy, kvtier_config
from tests.vllm.support.models import make_deepseek, make_llama, write_tokenizer
from tests.vllm.support.play import assert_at_rest, prompts_of

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.long

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "vllm-releases.md"
LENGTHS = [705, 400, 130]  #: in tokens
LONGEST = 2040
NAPS = 20  #: at each level of sleep
FEATURES: dict[str, dict[str, Any]] = {
    "several answers to a prompt (`n`)": {"n": 3, "temperature": 0.8, "seed": 5},
    "log probabilities": {"logprobs": 5},
    "log probabilities of the prompt": {"prompt_logprobs": 3},
    "`min_tokens` and stop tokens": {"min_tokens": 8, "stop_token_ids": [*range(3, 300)]},
    "`logit_bias`": {"logit_bias": {7: 5.0}},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    "`allowed_token_ids`": {"allowed_token_ids": [*range(5, 90)]},
    "`top_k`, `top_p` and a seed": {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "seed": 9},
    "structured output": {"choice": ["w10 w11", "w12"]},
}
"""By the name that the page has: what a request asks for."""


def plain(running: Engine) -> Any:
    return running.run(prompts_of(LENGTHS), 12).tokens


def asked(running: Engine, feature: str) -> Any:
    """Return all that one of ``FEATURES`` gives."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    wishes = dict(FEATURES[feature])
    if "choice" in wishes:
        wishes["structured_outputs"] = StructuredOutputsParams(choice=wishes.pop("choice"))
    wishes = {"temperature": 0.0, "max_tokens": 10} | wishes
    outputs = running.llm.generate(
        _token_prompts(LENGTHS), SamplingParams(**wishes), use_tqdm=False
    )
    return [
        [
            *([list(each.token_ids), _values(each.logprobs)] for each in output.outputs),
            _values(output.prompt_logprobs),
        ]
        for output in outputs
    ]


def ends(running: Engine) -> Any:
    return running.run([[5], *prompts_of([LONGEST])], 7).tokens


def beams(running: Engine) -> Any:
    from vllm.sampling_params import BeamSearchParams

    found = running.llm.beam_search(
        _token_prompts(LENGTHS), BeamSearchParams(beam_width=3, max_tokens=6)
    )
    return [[beam.tokens[-6:] for beam in output.sequences] for output in found]


def embeddings(running: Engine) -> Any:
    import torch

    seeded = torch.Generator().manual_seed(3)
    prompts = [{"prompt_embeds": torch.randn(each, 128, generator=seeded)} for each in (300, 200)]
    outputs = running.llm.generate(prompts, greedy(8), use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def pooled(running: Engine) -> Any:
    outputs = running.llm.embed(_token_prompts(LENGTHS), use_tqdm=False)
    return [list(output.outputs.embedding) for output in outputs]


def naps(running: Engine) -> Any:
    """Sleep again and again: vLLM's CPU platform keeps its memory, and resets its caches."""
    found = []
    for level in (1, 2):
        for _ in range(NAPS):
            running.llm.sleep(level)
            running.llm.wake_up()
            found.append(plain(running))
    assert all(each == found[0] for each in found)
    return found[0]


PLAYS: dict[str, Callable[[Engine], Any]] = {
    **{feature: partial(asked, feature=feature) for feature in FEATURES},
    "a prompt of one token, and the longest one": ends,
    "beam search": beams,
    "prompt embeddings": embeddings,
    "pooling": pooled,
    "sleep of levels 1 and 2": naps,
    "latent attention (MLA)": plain,
}
"""By the name that the page has: what plays it."""


def _token_prompts(lengths: list[int]) -> list[dict[str, Any]]:
    return [{"prompt_token_ids": prompt} for prompt in prompts_of(lengths)]


def _values(logprobs: Any) -> Any:
    return logprobs and [
        each and {str(token): found.logprob for token, found in each.items()} for each in logprobs
    ]


def played(
    model: str, config: dict[str, Any] | None, names: list[str], settings: dict[str, Any]
) -> list[dict[str, Any]]:
    """Play features cold and again in one engine, and with kvtier once more in a new one."""
    rounds = []
    for counts in (2, 1) if config else (1,):
        with engine(model, config, blocks=300, **settings) as running:
            for _ in range(counts):
                found = {}
                for name in names:
                    running.forget()
                    found[name] = PLAYS[name](running)
                    running.idle()
                rounds.append(found)
            if config:
                assert_at_rest(running.statistics())
                loaded = running.metrics().get("vllm:kv_offload_load_bytes", 0.0)
                rounds[-1]["loads"] = loaded > 0
    return rounds


@pytest.mark.parametrize(
    ("names", "make_model", "settings"),
    [
        pytest.param(
            [*FEATURES, "a prompt of one token, and the longest one", "beam search"],
            make_llama,
            {"skip_tokenizer_init": False},
            id="sampling",
        ),
        pytest.param(
            ["prompt embeddings"], make_llama, {"enable_prompt_embeds": True}, id="embeds"
        ),
        pytest.param(
            ["pooling"],
            make_llama,
            {"runner": "pooling", "convert": "embed", "skip_tokenizer_init": False},
            id="pooling",
        ),
        pytest.param(["sleep of levels 1 and 2"], make_llama, {}, id="sleep"),
        pytest.param(["latent attention (MLA)"], make_deepseek, {"block_size": 16}, id="mla"),
    ],
)
def test_a_feature_gives_the_same_with_kvtier_cold_from_dram_and_after_a_restart(
    names: list[str],
    make_model: Callable[[Path], Path],
    settings: dict[str, Any],
    tmp_path: Path,
    log_folder: Path,
) -> None:
    model = make_model(tmp_path / "model")
    write_tokenizer(model)
    tier = {"type": "fs", "root_dir": str(tmp_path / "kv")}
    (reference,), (cold, memory, restarted) = (
        run_scenario(
            played,
            log_folder=log_folder,
            model=str(model),
            config=config,
            names=names,
            settings=settings,
        )
        for config in (None, kvtier_config(secondary_tiers=[tier]))
    )
    for each in (cold, memory, restarted):
        for name in names:
            assert is_same(each[name], reference[name]), name
    sleeps = names == ["sleep of levels 1 and 2"]  # each nap is a reset
    assert memory["loads"] is restarted["loads"] is not sleeps


def is_same(one: Any, other: Any) -> bool:
    """Compare JSON values. Floats of a batch of another shape differ in their last places."""
    if isinstance(one, float):
        return one == pytest.approx(other, abs=1e-3)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(is_same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(is_same, one, other))
    return bool(one == other)


def test_the_page_lists_each_feature() -> None:
    rows = [line.split("|")[1].strip() for line in PAGE.read_text().splitlines() if "|" in line]
    assert PLAYS.keys() <= set(rows)
