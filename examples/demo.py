"""A real language model with a depot: the same answers, sooner, also after its process was killed.

    ./dev demo        or: python examples/demo.py [--path DIR] [--json]

Two users talk with SmolLM2-135M-Instruct about one long document, in four parts:

1. The model alone answers every question. It computes the whole prompt each time.
2. The same model answers with a depot. It computes only what the depot does not have.
3. The serving process is killed with SIGKILL and started again. Both users go on with their
   conversations, which are now on disk.
4. It is killed again, and one bit of the store is flipped. The depot notices the damaged block, and
   the model computes the tokens from there on.

Every answer with the depot is compared with the answer of the model alone, token by token. The exit
status is 1 if one of them differs. The parts take about two minutes on two processor cores.

`serve` runs in the serving process and is where kvdepot is used: it opens a depot, attaches it to
the model, and calls `generate` as with any model. The rest asks questions and shows the answers.
"""

import argparse
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.live import Live
from rich.table import Table

import kvdepot
from kvdepot.adapters.hf import smollm2
from kvdepot.errors import KVDepotError

HANDBOOK: Final = Path(__file__).with_name("handbook.txt")
INSTRUCTION: Final = (
    "You help the crew of a data hall. Answer from the handbook below, in one short sentence."
)
QUESTIONS: Final = {
    "Ada": (
        "How many storage nodes does the fleet have?",
        "How long does the restart of a node take?",
        "Where do the grey boxes go?",
    ),
    "Ben": (
        "When do we replace a flash drive?",
        "What does the light of a drive tell me?",
        "How do I close the transfer switch?",
    ),
}
"""The questions of each user. The last one comes after the restart."""
NEW_TOKENS: Final = 16
BLOCK_TOKENS: Final = 32
"""The depot fetches whole blocks. Small blocks leave few tokens of a known prompt to compute."""
DRAM: Final = "128MiB"
"""Room for the document, which has about 80 MB of KV, and for the latest turns."""
SSD: Final = "1GiB"
FLIPPED_BYTE: Final = 40_000_000
"""A byte in the middle of the document, which is written first, with 46,080 bytes a token."""
START_TIMEOUT_S: Final = 600.0
ANSWER_TIMEOUT_S: Final = 300.0
WARM_UP_TOKENS: Final = 256
ENVIRONMENT: Final = {
    "HF_HUB_OFFLINE": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
}
"""Libraries make no network lookups and print no advice. Waiting threads do not spin, which would
slow down computing threads on a busy machine. Variables of the caller take precedence."""

Message = dict[str, str]
"""`role` and `content`, as chat models take them."""
Part = Literal["with", "restarted", "damaged"]


@dataclass(frozen=True)
class Answer:
    """The answer to one prompt, and the tiers that its KV came from."""

    prompt_tokens: int
    ids: list[int]
    text: str
    ttft_s: float
    """Time to first token: from the arrival of the question in the serving process."""
    fetched: dict[str, int] = field(default_factory=dict)
    """Prompt tokens that came from each tier of the depot."""

    @property
    def computed_tokens(self) -> int:
        return self.prompt_tokens - sum(self.fetched.values())


@dataclass(frozen=True)
class Turn:
    """One question of one user, answered without the depot and with it."""

    part: Part
    user: str
    question: str
    without: Answer
    with_depot: Answer

    @property
    def same(self) -> bool:
        return self.without.ids == self.with_depot.ids

    @property
    def speedup(self) -> float:
        return self.without.ttft_s / self.with_depot.ttft_s


class FirstToken:
    """A streamer. `generate` passes it the prompt first, and then each new token."""

    def __init__(self) -> None:
        self._calls = 0
        self.at_s = 0.0

    def put(self, value: Any) -> None:
        self._calls += 1
        if self._calls == 2:
            self.at_s = time.perf_counter()

    def end(self) -> None: ...


def serve(connection: Connection, folder: Path, store: Path | None) -> None:
    """Answer conversations until the other end of `connection` is closed.

    The model is in float32. With fewer bits the two best tokens often tie, and then the order of a
    sum decides which one is taken.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends this one
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    from kvdepot.adapters.hf import attach

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if torch.cuda.is_available():
        model = model.to("cuda")
    answer(model, tokenizer, list(range(1, WARM_UP_TOKENS)), time.perf_counter())
    with ExitStack() as open_stores:
        served = model
        if store is not None:
            depot = kvdepot.open(dram=DRAM, ssd={"path": store, "capacity": SSD})
            open_stores.enter_context(depot)
            served = attach(model, depot, block_tokens=BLOCK_TOKENS)
        connection.send("ready")
        while True:
            try:
                messages: list[Message] = connection.recv()
            except EOFError:
                return
            started_s = time.perf_counter()
            prompt = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=False
            )
            connection.send(answer(served, tokenizer, prompt, started_s))


def answer(served: Any, tokenizer: Any, prompt: list[int], started_s: float) -> Answer:
    """Continue a prompt greedily. `served` is a model, with or without a depot."""
    import torch

    first = FirstToken()
    ids = torch.tensor([prompt], device=served.device)
    with torch.inference_mode():
        output = served.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            streamer=first,
        )
    new = output[0, len(prompt) :].tolist()
    text = tokenizer.decode(new, skip_special_tokens=True)
    ttft_s = first.at_s - started_s
    last = getattr(served, "last", None)  # what a depot did for the latest call
    fetched = dict(last.rows[0].fetched) if last is not None and last.rows else {}
    return Answer(len(prompt), new, text, ttft_s, fetched)


class Server:
    """The serving process, seen from the asking process."""

    def __init__(self, folder: Path, store: Path | None) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._connection, other_end = spawn.Pipe()
        self._process = spawn.Process(target=serve, args=(other_end, folder, store), daemon=True)
        self._process.start()
        other_end.close()
        self._receive(START_TIMEOUT_S)

    def ask(self, messages: list[Message]) -> Answer:
        self._connection.send(messages)
        received: Answer = self._receive(ANSWER_TIMEOUT_S)
        return received

    def kill(self) -> None:
        """End the process with SIGKILL, whatever it is doing."""
        self._process.kill()
        self._process.join()
        self._connection.close()

    def _receive(self, timeout_s: float) -> Any:
        if not self._connection.poll(timeout_s):
            self.kill()
            raise SystemExit(f"error: the serving process did not answer within {timeout_s:.0f} s")
        try:
            return self._connection.recv()
        except EOFError:
            self.kill()
            status = self._process.exitcode
            raise SystemExit(f"error: the serving process ended with status {status}") from None


@contextmanager
def serving(folder: Path, store: Path | None) -> Iterator[Server]:
    """A serving process that is killed at the end."""
    server = Server(folder, store)
    try:
        yield server
    finally:
        server.kill()


class Screen:
    """The table of results. It grows on a terminal, and is printed at the end elsewhere."""

    def __init__(self, console: Console) -> None:
        self._table = Table(
            title="Tokens of each prompt, and seconds to the first token of its answer",
            box=SIMPLE_HEAD,
            padding=(0, 1, 0, 0),
        )
        names = ("part", "user", "prompt", "memory", "disk", "computed", "alone", "depot", "ratio")
        for name in (*names, "answer"):
            is_text = name in ("part", "user", "answer")
            self._table.add_column(name, justify="left" if is_text else "right", no_wrap=True)
        self.live = Live(self._table, console=console)

    def say(self, words: str) -> None:
        self.live.console.print(words)

    def alone(self, user: str, given: Answer) -> None:
        tokens = f"{given.prompt_tokens:,}"
        cells = ("alone", user, tokens, "", "", tokens, f"{given.ttft_s:.2f}")
        self._table.add_row(*cells, style="dim")

    def compared(self, turn: Turn) -> None:
        given = turn.with_depot
        counts = (
            given.prompt_tokens,
            given.fetched.get("dram", 0),
            given.fetched.get("ssd", 0),
            given.computed_tokens,
        )
        self._table.add_row(
            turn.part,
            turn.user,
            *(f"{count:,}" for count in counts),
            f"{turn.without.ttft_s:.2f}",
            f"{given.ttft_s:.2f}",
            f"{turn.speedup:.1f}×",
            "same" if turn.same else "DIFFERENT",
            style="green" if turn.same else "bold red",
        )


@dataclass
class Demo:
    """The four parts. `turns` is what happened in the last three of them."""

    folder: Path
    store: Path
    screen: Screen
    turns: list[Turn] = field(default_factory=list)
    _asked: dict[tuple[str, int], list[Message]] = field(default_factory=dict)
    """The whole conversation, up to its question, by user and number of the question."""
    _alone: dict[tuple[str, int], Answer] = field(default_factory=dict)

    def run(self) -> None:
        last = len(next(iter(QUESTIONS.values()))) - 1
        self.screen.say("1. The model alone computes every prompt.")
        with serving(self.folder, None) as server:
            for number in range(last + 1):
                for user in QUESTIONS:
                    self._ask_alone(server, user, number)
        self.screen.say("2. With a depot it computes only what is new.")
        with serving(self.folder, self.store) as server:
            for number in range(last):
                for user in QUESTIONS:
                    self._compare(server, "with", user, number)
        self.screen.say("3. The process was killed (SIGKILL). A new one opens the same store.")
        with serving(self.folder, self.store) as server:
            for user in QUESTIONS:
                self._compare(server, "restarted", user, last)
        file = flip_bit(self.store, FLIPPED_BYTE)
        self.screen.say(f"4. The process was killed again, and one bit of {file} was flipped.")
        with serving(self.folder, self.store) as server:
            self._compare(server, "damaged", next(iter(QUESTIONS)), last)

    def _ask_alone(self, server: Server, user: str, number: int) -> None:
        if number == 0:
            words = f"{INSTRUCTION}\n\n{HANDBOOK.read_text('utf-8')}"
            before = [{"role": "system", "content": words}]
        else:
            heard = self._alone[user, number - 1].text
            before = [*self._asked[user, number - 1], {"role": "assistant", "content": heard}]
        messages = [*before, {"role": "user", "content": QUESTIONS[user][number]}]
        self._asked[user, number] = messages
        self._alone[user, number] = server.ask(messages)
        self.screen.alone(user, self._alone[user, number])

    def _compare(self, server: Server, part: Part, user: str, number: int) -> None:
        given = server.ask(self._asked[user, number])
        turn = Turn(part, user, QUESTIONS[user][number], self._alone[user, number], given)
        self.turns.append(turn)
        self.screen.compared(turn)


def flip_bit(store: Path, position: int) -> str:
    """Flip one bit of a store that is not open; returns the name of the file.

    `position` counts bytes from the start of the first segment. Segments are filled in the order of
    their names.
    """
    for file in sorted(store.glob("*.kvs")):
        size = file.stat().st_size
        if position < size:
            with file.open("r+b") as handle:
                handle.seek(position)
                (byte,) = handle.read(1)
                handle.seek(position)
                handle.write(bytes([byte ^ 1]))
            return file.name
        position -= size
    raise SystemExit(f"error: {store} has fewer bytes than the shared document")


def recomputed_tokens(turns: list[Turn]) -> int:
    """Tokens recomputed because of the flipped bit, against the same question without damage."""
    damaged = turns[-1]
    sound = next(
        turn for turn in turns if (turn.part, turn.question) == ("restarted", damaged.question)
    )
    return damaged.with_depot.computed_tokens - sound.with_depot.computed_tokens


def summary(turns: list[Turn]) -> str:
    different = [turn for turn in turns if not turn.same]
    lines = [f"{turn.user} got another answer to: {turn.question}" for turn in different]
    if different:
        lines.append(f"{len(different)} of {len(turns)} answers differ")
    else:
        lines.append(f"All {len(turns)} answers are the same, token for token.")
    first, restarted = turns[0], next(turn for turn in turns if turn.part == "restarted")
    lines += [
        f"First token with an empty depot: {first.with_depot.ttft_s:.2f} s.",
        f"First token after the restart, from disk: {restarted.with_depot.ttft_s:.2f} s.",
        f"The flipped bit cost {recomputed_tokens(turns):,} tokens, which were computed again.",
    ]
    return "\n".join(lines)


def document(turns: list[Turn]) -> dict[str, Any]:
    """All that happened, for --json."""
    return {
        "identical": all(turn.same for turn in turns),
        "recomputed_tokens": recomputed_tokens(turns),
        "turns": [asdict(turn) | {"same": turn.same} for turn in turns],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--path", type=Path, metavar="DIR", help="put the store on this disk")
    parser.add_argument("--json", action="store_true", help="print what happened as JSON")
    args = parser.parse_args()
    console = Console(stderr=args.json, highlight=False)
    os.environ.update({**ENVIRONMENT, **os.environ})
    try:
        with console.status(f"making {smollm2.NAME} ready (a minute the first time)"):
            folder = smollm2.prepare(Path.home() / ".cache" / "kvdepot" / "models")
    except KVDepotError as error:
        raise SystemExit(f"error: {error}\nhint: {error.hint}") from error
    screen = Screen(console)
    with tempfile.TemporaryDirectory(prefix="kvdepot-demo-", dir=args.path) as place:
        demo = Demo(folder, Path(place) / "store", screen)
        with screen.live:
            demo.run()
    console.print(f"\n{summary(demo.turns)}")
    if args.json:
        json.dump(document(demo.turns), sys.stdout, indent=2)
    return 0 if all(turn.same for turn in demo.turns) else 1


if __name__ == "__main__":
    raise SystemExit(main())
