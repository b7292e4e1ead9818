"""What pages of the docs have vLLM read, vLLM reads, and kvtier takes."""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING

from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from kvtier.tools.cli.main import main
from tests.support.printed import SPEC, Walk, configurations

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

MY_PACKAGE = """
from tests.vllm.support.scripted_tier import ScriptedTier as MyTier
from tests.vllm.support.tenant_tier import TenantTier
"""


def test_an_engine_is_switched_with_vllms_own_option_for_memory(tmp_path: Path) -> None:
    program, serve, _model, *options = shlex.split(
        Walk("how-to/switch-from-vllm-tiering.md", tmp_path).take()
    )
    assert (program, serve) == ("vllm", "serve")
    found = EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(options)
    assert found.kv_offloading_size == 8
    assert found.kv_transfer_config.kv_connector_extra_config == SPEC


def test_an_engine_would_take_vllms_tiers_as_the_page_hosts_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package/tier.py").write_text(MY_PACKAGE)
    monkeypatch.syspath_prepend(tmp_path)
    name = "how-to/host-vllms-tiers.md"
    page = Walk(name, tmp_path)
    for each in configurations(name):
        (tmp_path / "kv.json").write_text(page.here(json.dumps(each)))
        assert main(["check", str(tmp_path / "kv.json")]) == 0, capsys.readouterr().out
