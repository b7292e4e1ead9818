"""The models that engine tests run on, made once a session."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvtier.plugin_api.log import log
from tests.support.patient_limits import _patient_limits  # noqa: F401 - a fixture
from tests.vllm.support.engine import TEST_RUN
from tests.vllm.support.importing import importing_vllm
from tests.vllm.support.models import make_gemma, make_llama

with importing_vllm():
    import vllm

    import kvtier.vllm.spec  # noqa: F401 - imported for that alone

os.environ[TEST_RUN] = str(os.getpid())
# vLLM keeps a description of each model class that it has looked at, in a process of its own
# that takes twelve seconds. One release cannot read another's and writes its own in its place.
_CACHE = Path(__file__).parents[2] / "build" / f"vllm-{vllm.__version__}"
os.environ["VLLM_CACHE_ROOT"] = str(_CACHE)


@pytest.fixture(autouse=True)
def _own_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have kvtier print its lines: vLLM's handler keeps the output of the test that came first."""
    monkeypatch.setattr(log, "_sink", None)


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a Llama with one KV-cache group."""
    return make_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a Gemma 3 with a sliding-window and a full-attention group."""
    return make_gemma(tmp_path_factory.mktemp("gemma"))


@pytest.fixture
def log_folder(tmp_path: Path) -> Path:
    """Where the child processes of a test write their logs."""
    return tmp_path / "logs"
