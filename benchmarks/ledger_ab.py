"""What the ledger claims to have saved, beside what an A/B run of the same traffic measures.

    python benchmarks/ledger_ab.py [--rounds N] [--users N] [--json]

A small model with random weights, on the processor, by transformers. Users come back with a longer
prompt each turn; all prompts are computed by the plain model (A) and by the same model with a depot
in memory (B), by turns, in each round with prompts of its own. Measured is the time inside the
model's forward: A less B is what was saved. The engine's prefill speed is fitted to the forwards of
a first round of A. The bar: the claim is within 10 % of it (median of the rounds).
"""

import argparse
import functools
import json
import sys
import time
from statistics import median
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import kvdepot
from kvdepot.adapters.hf import attach
from kvdepot.policy.fetching.speed_models import PrefillModel, attention_work
from kvdepot.store.store import Store

BAR: Final = 0.10
TURNS: Final = 4
TURN_TOKENS: Final = 384
_VOCABULARY: Final = 512


class TimedForward:
    """The seconds inside a model's forward, and the speed of its prefill."""

    def __init__(self, model: Any) -> None:
        self.seconds = 0.0
        self.pace = PrefillModel()
        inner = model.forward

        @functools.wraps(inner)
        def forward(*args: Any, **given: Any) -> Any:
            cache = given.get("past_key_values")
            before = int(cache.get_seq_length()) if cache is not None else 0
            began_s = time.perf_counter()
            answer = inner(*args, **given)
            took_s = time.perf_counter() - began_s
            self.seconds += took_s
            tokens = int(given["input_ids"].shape[1])
            self.pace.observe(tokens, attention_work(tokens, before), took_s)
            return answer

        model.forward = forward


def small_model() -> Any:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        bos_token_id=None,
        eos_token_id=None,
    )
    return AutoModelForCausalLM.from_config(config).eval()


def turns(users: int, seed: int) -> list[Any]:
    """Prompts in the order in which they come: every user's first turn, then the second."""
    chance = torch.Generator().manual_seed(seed)
    size = (users, TURNS * TURN_TOKENS)
    tokens = torch.randint(0, _VOCABULARY, size, generator=chance)
    return [
        tokens[user : user + 1, : (turn + 1) * TURN_TOKENS]
        for turn in range(TURNS)
        for user in range(users)
    ]


def play(model: Any, prompts: list[Any], timed: TimedForward) -> float:
    """Seconds inside the forward for all prompts."""
    before = timed.seconds
    for prompt in prompts:
        with torch.no_grad():
            model.generate(prompt, max_new_tokens=1, do_sample=False)
    return timed.seconds - before


def compare(rounds: int, users: int) -> dict[str, Any]:
    plain = small_model()
    timed, found = TimedForward(plain), []
    play(plain, turns(users, 0), timed)
    with kvdepot.open(dram={"capacity": "1GiB", "prefault": False}) as store:
        assert isinstance(store, Store)
        for number in range(1, rounds + 1):
            prompts = turns(users, number)
            without_s = play(plain, prompts, timed)
            served = attach(plain, store)
            pace = timed.pace.pace()
            assert pace is not None
            token_s = max(pace.token_s, 1e-12)  # a fit may find no cost but that of pairs
            for space in store.described_namespaces():
                store.sessions.tell_prefill(space.tag.hex(), token_s, pace.pair_s)
            before = store.sessions.ledger()["total"]["gpu_s"]
            with_s = 0.0
            for prompt in prompts:
                with_s += play(served, [prompt], timed)
                served.flush()
            claimed_s = store.sessions.ledger()["total"]["gpu_s"] - before
            served.close()
            measured_s = without_s - with_s
            found.append({"claimed_s": claimed_s, "measured_s": measured_s})
    ratios = [one["claimed_s"] / one["measured_s"] for one in found]
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
    found = compare(args.rounds, args.users)
    print(json.dumps(found, indent=1) if args.json else found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
