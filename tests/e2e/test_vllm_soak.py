"""The soak's judgement: what grows is seen, what only varies is not."""

import argparse
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.e2e.e2e_points import Points
from tests.e2e.vllm_soak import (
    DEPOT_MIB,
    PHASES,
    SIX_HOURS,
    Measured,
    Service,
    Sizes,
    Traffic,
    judge,
    rise,
)

ROUNDS = 8
STEADY = {"memory_bytes": 1 << 30, "threads": 20, "descriptors": 90, "shared_bytes": 16 << 20}


def measured(
    part: str = "", what: str = "", each: int = 0, first_turn: int = 0, lives: int = ROUNDS // 2
) -> list[Measured]:
    """A run in which one figure rises after each phase, from a round on."""
    found, extra = [], 0
    for turn in range(ROUNDS):
        for number, _ in enumerate(PHASES):
            wave = 1 << 20 if number % 2 else 0
            sizes: dict[str, Sizes] = {
                "engine": {**STEADY, "memory_bytes": STEADY["memory_bytes"] + wave},
                "daemon": {**STEADY, "memory_bytes": STEADY["memory_bytes"] + wave},
                "folder": {"bytes": 32 << 20, "files": 9},
            }
            if part:
                extra += each if turn >= first_turn else 0
                sizes[part][what] += extra
            found.append(Measured(turn, min(turn + 1, lives), **sizes))
    return found


def failed(taken: list[Measured], **changes: Any) -> list[str]:
    counts = {"answered": SIX_HOURS, "failed": 0, "wrong": 0, "given up": 10, **changes}
    requests = counts["answered"] + counts["given up"] + counts["failed"]
    fetched = dict.fromkeys(PHASES, 100)
    traffic = cast(
        Traffic, SimpleNamespace(counts=counts, errors=[], fetched=fetched, requests=requests)
    )
    service = cast(Service, SimpleNamespace(starts=taken[-1].life))
    run = Points(as_json=True)
    judge(run, argparse.Namespace(minutes=20.0), traffic, taken, service)
    return [each["point"] for each in run.found if not each["ok"]]


def test_the_rise_is_that_of_the_line() -> None:
    assert rise([5, 6, 7, 8]) == pytest.approx(3.0)
    assert rise([7, 7, 7]) == 0.0
    assert rise([4]) == 0.0
    assert abs(rise([0, 10] * 12)) < 5


def test_a_steady_run_passes() -> None:
    assert failed(measured()) == []


@pytest.mark.parametrize(
    ("part", "what", "each"),
    [
        ("engine", "memory_bytes", 3 << 20),
        ("engine", "descriptors", 1),
        ("daemon", "threads", 1),
        ("daemon", "memory_bytes", 1 << 20),
        ("daemon", "shared_bytes", 1 << 20),
        ("folder", "files", 1),
    ],
)
def test_a_leak_in_the_second_half_is_found(part: str, what: str, each: int) -> None:
    late = f"no growth of the {part} in the second half"
    assert late in failed(measured(part, what, each, ROUNDS // 2))


def test_what_is_left_by_each_killed_daemon_is_found() -> None:
    taken = measured()
    for each in taken:
        each.engine["descriptors"] += min(each.turn, ROUNDS // 2)
    assert failed(taken) == ["no growth of the engine after the first round"]


def test_a_daemon_that_died_in_the_second_half_does_not_pass() -> None:
    assert "no growth of the daemon in the second half" in failed(measured(lives=ROUNDS))


def test_requests_and_the_folder_are_judged() -> None:
    assert failed(measured(), failed=1) == ["no request failed"]
    assert failed(measured(), wrong=1) == ["no answer is wrong"]
    assert failed(measured(), answered=100) == ["the traffic of six hours"]
    taken = measured()
    taken[3].folder["bytes"] = (DEPOT_MIB + 16) << 20
    assert failed(taken) == ["the folder is bounded"]
