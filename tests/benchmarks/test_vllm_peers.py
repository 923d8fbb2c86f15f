"""vLLM's peers side by side: the order of the arms, and the bars. The servers are made up."""

import argparse
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "vllm_peers.py"


@pytest.fixture(scope="module")
def peers() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("vllm_peers", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["vllm_peers"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["vllm_peers"]


def compared(
    peers: ModuleType, monkeypatch: pytest.MonkeyPatch, speeds: dict[str, float], cached: int = 128
) -> tuple[dict[str, Any], list[str]]:
    """A run with arms that take so long for a prompt, and the order of what was done."""
    done: list[str] = []

    class MadeUp(peers.Arm):  # type: ignore[misc, name-defined]
        def start(self) -> None:
            done.append(f"{self.name} starts")

        def kill(self) -> None:
            done.append(f"{self.name} is killed")

        def forget(self) -> None:
            done.append(f"{self.name} forgets")

        def worker_cpu_s(self) -> float:
            return 0.0

        def ask(self, prompt: list[int], tokens: int = 1) -> dict[str, Any]:
            found = 0 if self.name == "plain" else cached
            return {"seconds": speeds[self.name], "cached": found}

    monkeypatch.setattr(peers, "SETTLE_S", 0.0)
    monkeypatch.setattr(peers, "drop_page_cache", lambda: True)
    arms = [MadeUp(name, Path(), Path()) for name in speeds]
    args = argparse.Namespace(
        parts=["memory", "disk"], seed=1, rounds=3, disk_rounds=2, turn_rounds=1
    )
    return peers.summary(peers.measure(args, arms)), done


def test_arms_take_turns_and_have_medians(
    peers: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    speeds = {"plain": 10.0, "kvdepot": 0.8, "tiering": 1.0}
    whole, done = compared(peers, monkeypatch, speeds)
    assert whole["ok"]
    assert [bar["ratio"] for bar in whole["bars"]] == [0.8, 0.8]
    assert whole["parts"]["memory"]["plain"]["cached"] == [0, 0, 0]
    assert done[:3] == ["plain forgets", "kvdepot forgets", "tiering forgets"]
    assert done[3:6] == ["kvdepot forgets", "tiering forgets", "plain forgets"]
    assert [one for one in done if "starts" in one] == [
        "kvdepot starts",
        "tiering starts",
        "tiering starts",
        "kvdepot starts",
    ]


def test_a_missed_bar_and_an_arm_without_hits_do_not_pass(
    peers: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, _ = compared(peers, monkeypatch, {"kvdepot": 0.95, "tiering": 1.0})
    assert [bar["met"] for bar in whole["bars"]] == [True, False]
    assert not whole["ok"]
    whole, _ = compared(peers, monkeypatch, {"kvdepot": 0.5, "tiering": 1.0}, cached=0)
    assert not whole["ok"]
    assert "disk: tiering" in whole["without_hits"]


def test_the_users_turns_are_played_once_by_those_without_a_close_bar(peers: ModuleType) -> None:
    assert peers.rounds_of("plain", "turns", 3) == 1
    assert peers.rounds_of("lmcache", "turns", 3) == 1
    assert peers.rounds_of("kvdepot", "turns", 3) == 3
    assert peers.rounds_of("plain", "disk", 3) == 0
