"""A network that drops or resets between a tier and its server: misses, and recovery by itself.

Real servers, in a network namespace, where nftables drops packets or answers them with resets.
In all of it each call ends in time, no byte is wrong, no slot is written to after its call, and
no task or socket is left.

The parts run at the same time, each in a namespace and a process of its own: they mostly wait.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.needs import needs
from tests.support.network_namespace import run_inside
from tests.unit.backends.network import _inside

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [needs("network namespace"), pytest.mark.slow]

Part = tuple[Callable[..., Any], *tuple[str, ...]]
Ends = Callable[[Part], None]


def parts(*given: Part, long: tuple[Part, ...] = ()) -> pytest.MarkDecorator:
    """Run a test for each of these."""
    listed = [(each, []) for each in given] + [(each, [pytest.mark.long]) for each in long]
    return pytest.mark.parametrize(
        "part",
        [
            pytest.param(part, id="-".join(part[1:]) or part[0].__name__, marks=marks)
            for part, marks in listed
        ],
    )


@pytest.fixture(scope="module")
def ends(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Ends]:
    """Begin all parts that are to run here; give what waits for one, and raises what it raised."""
    items: list[Any] = request.session.items
    to_run = [each.callspec.params["part"] for each in items if each.path == request.path]
    with ThreadPoolExecutor(len(to_run)) as threads:
        begun: dict[Part, Future[None]] = {
            part: threads.submit(run_inside, part[0], tmp_path_factory.mktemp("inside"), *part[1:])
            for part in to_run
        }
        yield lambda part: begun[part].result()


@parts((_inside.packets_fare_as_told,))
def test_packets_are_dropped_or_reset_as_told(part: Part, ends: Ends) -> None:
    """Otherwise the tests below would break nothing."""
    ends(part)


@parts(
    (_inside.breaks_and_heals, "redis"),
    (_inside.breaks_and_heals, "s3"),
    # Of a Mooncake store, the gate has an owner that resets, and a master that hangs or is killed.
    long=((_inside.breaks_and_heals, "mooncake"),),
)
def test_a_network_that_drops_or_resets_costs_misses_and_hits_come_back(
    part: Part, ends: Ends
) -> None:
    """Both ways, one way, within a reply, and with resets; the connection goes and comes once."""
    ends(part)


@parts((_inside.is_stranded, "redis"), (_inside.is_stranded, "s3_idle"))
def test_connections_that_a_firewall_forgot_cost_one_call(part: Part, ends: Ends) -> None:
    """Not one call each, and all of its time: they are dropped silently, while new ones work."""
    ends(part)


@needs("mooncake")
@parts((_inside.owner_is_reset,))
def test_an_owner_of_memory_that_resets_costs_its_blocks_until_it_answers(
    part: Part, ends: Ends
) -> None:
    """The master, which can be reached, goes on naming them."""
    ends(part)
