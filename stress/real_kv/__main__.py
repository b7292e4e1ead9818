"""Have vLLM store keys and values of a real model in an fs tier: ``python -m stress.real_kv``.

``--folder FOLDER --dtype bfloat16`` writes them below ``FOLDER/bfloat16``, where
``stress.bench compression --folder`` finds them. The texts are this repository's docs and sources.
Needs vLLM, and the packages of requirements/real-kv.txt: ``make bench-compression`` has both.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any, Final

PROMPT_TOKENS_MAX: Final = 1500
TEXTS: Final = (
    "docs/explanation/architecture.md",
    "docs/explanation/promises.md",
    "docs/how-to/share-a-folder.md",
    "kvtier/plugin_api/backend.py",
)
_BLOCK_TOKENS: Final = 32
_STORED_S: Final = 60.0
_ROOT: Final = Path(__file__).parents[2]


def main() -> None:
    """Write the model if it is not there, and let an engine read the texts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    arguments = parser.parse_args()
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    from stress.real_kv import model  # noqa: PLC0415 - the environment is read at import

    folder = arguments.folder / "model"
    if not folder.exists():
        model.write_model(folder)
    texts = {name: (_ROOT / name).read_text() for name in TEXTS}
    prompts = model.tokens_of(folder, texts, PROMPT_TOKENS_MAX)
    root = arguments.folder / arguments.dtype
    root.mkdir(mode=0o700, exist_ok=True)
    expected = sum(len(prompt) // _BLOCK_TOKENS for prompt in prompts)
    _store(folder, arguments.dtype, root, prompts, expected)
    print(f"{len(list(root.rglob('*.kv')))} blocks of {expected} below {root}")


def _store(folder: Path, dtype: str, root: Path, prompts: list[list[int]], expected: int) -> None:
    """Run the prompts, and step the engine until their blocks are stored."""
    import vllm  # noqa: PLC0415 - as above
    from vllm.config import KVTransferConfig  # noqa: PLC0415

    extra = {
        "spec_name": "KVTierOffloadingSpec",
        "spec_module_path": "kvtier.vllm.spec",
        "cpu_bytes_to_use": 512 << 20,
        "secondary_tiers": [{"type": "fs", "root_dir": str(root)}],
    }
    make: Any = vllm.LLM
    engine = make(
        model=str(folder),
        skip_tokenizer_init=True,
        dtype=dtype,
        enforce_eager=True,
        block_size=_BLOCK_TOKENS,
        max_model_len=2048,
        num_gpu_blocks_override=200,
        disable_log_stats=False,
        kv_transfer_config=KVTransferConfig(
            kv_connector="OffloadingConnector",
            kv_role="kv_both",
            kv_connector_extra_config=extra,
        ),
    )
    sampling = vllm.SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, detokenize=False)
    deadline_s = time.monotonic() + _STORED_S
    for prompt in prompts:
        engine.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
    while len(list(root.rglob("*.kv"))) < expected and time.monotonic() < deadline_s:
        # What was stored is noticed in an engine's step; a short prompt makes an idle one step.
        engine.generate([{"prompt_token_ids": [3]}], sampling, use_tqdm=False)
        time.sleep(0.05)
    engine.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
