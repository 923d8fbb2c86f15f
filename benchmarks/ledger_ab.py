"""What the ledger claims to have saved, beside what an A/B run of the same traffic measures.

    python benchmarks/ledger_ab.py [--rounds N] [--users N] [--json]

A small model with random weights, by transformers, on the processor, with one thread. Users come
back with a longer prompt each turn. Each round has prompts of its own, which are computed by the
plain model (A) and with the depot (B), by turns. Both sides are processor seconds of the thread
that computes, so that other work on the machine does not count:

- claimed: what the ledger adds in B, by the prefill speed that the engine itself has reported;
- measured: what the engine computes in A less what it computes in B.

The speed is learnt in a first round, which is not judged, and in all rounds after it.
The bar: the claim is within 10 % of what is measured (median of the rounds).
"""

import argparse
import functools
import json
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import kvdepot
from kvdepot.adapters.hf import attach
from kvdepot.store.store import Store

BAR: Final = 0.10
TURNS: Final = 4
TURN_TOKENS: Final = 384
_VOCABULARY: Final = 512
_WAIT_S: Final = 60.0


def small_model() -> Any:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=None,
    )
    return AutoModelForCausalLM.from_config(config).eval()


def turns(users: int, seed: int) -> list[list[int]]:
    """Prompts in the order in which they come: every user's first turn, then the second."""
    chance = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, _VOCABULARY, (users, TURNS * TURN_TOKENS), generator=chance).tolist()
    return [
        tokens[user][: (turn + 1) * TURN_TOKENS] for turn in range(TURNS) for user in range(users)
    ]


class TimedCalls:
    """Processor seconds of this thread inside a function."""

    def __init__(self, owner: Any, name: str) -> None:
        self.seconds = 0.0
        inner = getattr(owner, name)

        @functools.wraps(inner)
        def timed(*args: Any, **given: Any) -> Any:
            began_s = time.thread_time()
            try:
                return inner(*args, **given)
            finally:
                self.seconds += time.thread_time() - began_s

        setattr(owner, name, timed)

    def during(self, work: Callable[[], None]) -> float:
        before = self.seconds
        work()
        return self.seconds - before


Round = Callable[[int], tuple[float, float, float]]
"""For a seed: seconds computed in A, in B, and claimed in B."""


def transformers_rounds(users: int) -> tuple[Round, Callable[[], None]]:
    torch.set_num_threads(1)
    plain = small_model()
    timed = TimedCalls(plain, "forward")
    store = kvdepot.open(dram={"capacity": "1GiB", "prefault": False})
    assert isinstance(store, Store)
    served = attach(plain, store)
    meter = served._parts.meter
    meter.clock = time.thread_time

    def ask(model: Any, prompts: list[list[int]]) -> None:
        for prompt in prompts:
            with torch.no_grad():
                model.generate(torch.tensor([prompt]), max_new_tokens=1, do_sample=False)
            served.flush()

    def play(seed: int) -> tuple[float, float, float]:
        prompts = turns(users, seed)
        without_s = timed.during(lambda: ask(plain, prompts))
        meter.tell()
        meter.teller.wait(_WAIT_S)
        before = store.admin.ledger()["total"]["gpu_s"]
        with_s = timed.during(lambda: ask(served, prompts))
        return without_s, with_s, store.admin.ledger()["total"]["gpu_s"] - before

    def close() -> None:
        served.close()
        store.close()

    return play, close


def compare(play: Round, rounds: int) -> dict[str, Any]:
    play(0)
    found = []
    for number in range(1, rounds + 1):
        without_s, with_s, claimed_s = play(number)
        measured_s = without_s - with_s
        found.append(
            {
                "without_s": without_s,
                "with_s": with_s,
                "claimed_s": claimed_s,
                "measured_s": measured_s,
                "ratio": claimed_s / measured_s if measured_s else 0.0,
            }
        )
        print(json.dumps(found[-1]), file=sys.stderr, flush=True)
    ratios = [one["ratio"] for one in found]
    return {
        "rounds": found,
        "ratio": {"median": median(ratios), "min": min(ratios), "max": max(ratios)},
        "bar": BAR,
        "met": abs(median(ratios) - 1.0) <= BAR,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, metavar="N")
    parser.add_argument("--users", type=int, default=8, metavar="N")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    play, close = transformers_rounds(args.users)
    try:
        found = {"users": args.users, **compare(play, args.rounds)}
    finally:
        close()
    print(json.dumps(found, indent=1) if args.json else found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
