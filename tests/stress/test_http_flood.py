"""A smaller `python -m tests.stress.http_flood`, for every CI."""

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.stress.http_flood import (
    Seen,
    Smuggled,
    flood_daemon,
    flood_proxy,
    smuggle_at_daemon,
    smuggle_at_proxy,
    smuggle_in_processes,
)
from tests.support.failures import check_data

from kvdepot.io.acceptor import CONNECTIONS_MAX

CONNECTIONS = 300
SECONDS = 3.0
ROOM_MIB = 256
pytestmark = [pytest.mark.slow, pytest.mark.stress]


def check(seen: Seen, descriptors_of_requests: int) -> None:
    assert seen.health_answers >= 3 and not seen.health_failures
    assert seen.memory_most_mib < seen.memory_before_mib + ROOM_MIB
    most = seen.descriptors_before + CONNECTIONS_MAX + descriptors_of_requests
    assert seen.descriptors_most <= most
    assert seen.threads_most < 120 and seen.log_bytes < 100_000


def test_a_daemon_under_a_flood_answers_for_its_health(tmp_path: Path) -> None:
    # Connections that are just being closed, and those of the process itself.
    check(flood_daemon(tmp_path, CONNECTIONS, SECONDS), 40)


def test_the_proxy_under_a_flood_answers_for_its_health(tmp_path: Path) -> None:
    # Each request that is passed on has a connection to llama-server, too.
    check(flood_proxy(tmp_path, CONNECTIONS, SECONDS), 140)


@pytest.mark.parametrize("smuggle", [smuggle_at_daemon, smuggle_at_proxy])
def test_no_smuggled_request_gets_an_answer(smuggle: Callable[[int, int], Smuggled]) -> None:
    found = smuggle_in_processes(smuggle, 1, 300)
    check_data(not found.wrong, str(found.wrong[:5]))
    assert found.answers >= 300
