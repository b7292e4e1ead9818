"""Every tier that compresses passes the shipped suite, with blocks that shrink and that don't."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kvtier.settings.plugins import make_backend
from kvtier.settings.runtime_config import TierConfig
from kvtier.testing import BACKEND_CHECKS, PERSISTENCE_CHECKS, BackendCheck, _workbench, conformance
from kvtier.tools.bench.kv_like import kv_like
from tests.conformance._together import together
from tests.support.mooncake_server import running as running_mooncake
from tests.support.patience import PATIENCE_S
from tests.support.redis_servers import running as running_redis
from tests.support.s3_server import moto_server, options_for, set_credentials

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvtier.plugin_api.backend import Backend, BackendContext

KEY_VARIABLE = "KVTIER_TEST_COMPRESSED_KEY"
ON = {"compression": "bitplane-zstd"}
ENCRYPTED = {**ON, "encryption_key_env": KEY_VARIABLE}
SIGNED = {**ON, "auth_key_env": KEY_VARIABLE}
Tier = tuple[str, dict[str, Any]]

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

FORMS = [
    ("fs", ON),
    ("fs", SIGNED),
    ("fs", ENCRYPTED),
    ("redis", ON),
    ("redis", ENCRYPTED),
    ("s3", ON),
    ("mooncake", ON),
    ("mooncake", SIGNED),
]
MOVE_BYTES = (
    conformance.blocks_come_back_byte_exact,
    conformance.the_digest_is_kept_not_made_up,
    conformance.any_number_of_blocks_is_a_batch,
    conformance.a_load_stays_in_its_buffer,
    conformance.odd_block_sizes_work_or_are_refused,
    conformance.blocks_outlive_the_backend,
)
"""The gate runs these of each form, and all checks of one. Of the others, what a tier does with
bytes is no part, and its own tests here run them without compression."""


def runs_in_the_gate(check: BackendCheck, form: tuple[str, object]) -> bool:
    """Tell whether ``make test`` runs this; ``make test-long`` runs all."""
    if form == ("redis", ENCRYPTED):
        return True
    if form == ("mooncake", SIGNED):
        return check is conformance.blocks_come_back_byte_exact
    return check in MOVE_BYTES


def parameters() -> Iterator[Any]:
    """Yield each check of each form: checks of one tier after the other, as its server is there."""
    for tier, extra in FORMS:
        checks = BACKEND_CHECKS + PERSISTENCE_CHECKS
        if (tier, extra) == ("mooncake", ON):
            yield pytest.param(together(MOVE_BYTES), tier, extra, id="mooncake-compression-moves")
            checks = tuple(each for each in checks if each not in MOVE_BYTES)
        for check in checks:
            marks = [] if runs_in_the_gate(check, (tier, extra)) else [pytest.mark.long]
            name = "-".join([tier, *extra, check.__name__])
            yield pytest.param(check, tier, extra, id=name, marks=marks)


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tier]:
    with running_redis("valkey", tmp_path_factory.mktemp("valkey")) as server:
        patient = dict.fromkeys(("connect_timeout_s", "call_timeout_s"), PATIENCE_S)
        yield "redis", {"url": server.url, "connections_max": 4, **patient}


@pytest.fixture(scope="module")
def s3() -> Iterator[Tier]:
    set_credentials()
    with moto_server() as server:
        yield "s3", options_for(server.endpoint, "compressed")


@pytest.fixture(scope="module")
def mooncake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tier]:
    with running_mooncake(tmp_path_factory.mktemp("mooncake")) as cluster:
        yield "mooncake", {"master": cluster.address}


@pytest.fixture(scope="module")
def fs(tmp_path_factory: pytest.TempPathFactory) -> Tier:
    return "fs", {"root_dir": str(tmp_path_factory.mktemp("fs")), "n_read_threads": 4}


@pytest.fixture
def shrinking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let two blocks of three be as those of a model."""
    seeds = iter(range(1 << 30))

    def data(size: int) -> bytes:
        seed = next(seeds)
        return _random(size) if seed % 3 == 0 else kv_like(size + size % 2, seed)[:size]

    monkeypatch.setattr(_workbench, "random_data", data)


_random = _workbench.random_data


@pytest.mark.usefixtures("shrinking")
@pytest.mark.parametrize(("check", "tier", "extra"), [*parameters()])
async def test_a_compressed_tier_keeps_the_contract(
    check: BackendCheck,
    tier: str,
    extra: dict[str, Any],
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "ab" * 32)
    kind, options = request.getfixturevalue(tier)

    def make(context: BackendContext) -> Backend:
        return make_backend(
            TierConfig(kind, context.tier_name, options={**options, **extra}), context
        )

    await check(make)
