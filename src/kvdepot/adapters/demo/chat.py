"""A chat model that answers greedily and measures how long its first token takes.

With a depot or without it is the same model in the same dtype, so the two can be compared: token by
token, second by second.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

from kvdepot.core.depot import Depot
from kvdepot.core.hf_config import model_layout
from kvdepot.errors import ExtraMissingError, ModelError

_WARM_UP_TOKENS: Final = 256

Message = dict[str, str]
"""`role` and `content`."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What one prompt was answered, and where its KV came from."""

    prompt_tokens: int
    ids: list[int]
    text: str
    ttft_s: float
    """From the call to the first new token, a depot's lookup and onboarding included."""
    seconds: float
    """Until the call returned."""
    fetched: dict[str, int] = field(default_factory=dict)
    """Prompt tokens from each tier."""
    computed_tokens: int = 0
    misses: dict[str, int] = field(default_factory=dict)
    """Blocks that were found but could not be had, by reason."""


class FirstTokenTimer:
    """A streamer: generate() shows it the prompt first, then each new token."""

    def __init__(self) -> None:
        self._seen = 0
        self.at_s = 0.0

    def put(self, value: Any) -> None:
        self._seen += 1
        if self._seen == 2:
            self.at_s = time.perf_counter()

    def end(self) -> None: ...


class ChatModel:
    """A causal language model and its tokenizer, in float32, on the GPU if there is one.

    float32 because greedy answers are compared: with 8 bits of mantissa the two best tokens often
    tie, and then the order of a sum decides.
    """

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._depot: Any = None
        self.device = str(model.device)
        self.vocabulary: int = model.config.vocab_size
        self.context_tokens: int = getattr(model.config, "max_position_embeddings", 1 << 20)

    @property
    def token_bytes(self) -> int:
        """Bytes of KV that one token has in all layers."""
        layout = model_layout(self._model.config.to_dict(), dtype="float32")
        return sum(group.bytes_per_token for group in layout.groups)

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Load from a transformers model folder and run once, so that no first use is slow."""
        try:
            import torch
            from transformers import AutoModelForCausalLM, AutoTokenizer
            from transformers.utils import logging
        except ImportError as error:
            raise ExtraMissingError("demo", error.name or "transformers") from error
        if not (folder / "config.json").is_file():
            raise ModelError(f"{folder} is not a model folder: it has no config.json")
        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        try:
            tokenizer: Any = AutoTokenizer.from_pretrained(folder)
            model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        except (OSError, ValueError) as error:
            raise ModelError(f"{folder} cannot be loaded: {error}") from error
        if torch.cuda.is_available():
            model = model.to("cuda")
        chat = cls(model.eval(), tokenizer)
        chat.answer([1 + number % 64 for number in range(_WARM_UP_TOKENS)], 2)
        return chat

    def attach(self, store: Depot, **settings: Any) -> None:
        """Answer from now on with `store`, in place of the one before."""
        from kvdepot.adapters.hf import attach

        self._depot = attach(self._model, store, **settings)

    def detach(self) -> None:
        self._depot = None

    def flush(self) -> None:
        """Wait until all that was computed is in the store."""
        if self._depot is not None:
            self._depot.flush()

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation that ends with a question. ModelError without template."""
        if not self._tokenizer.chat_template:
            raise ModelError("the model has no chat template", hint="give an instruct model")
        ids: list[int] = self._tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, return_dict=False
        )
        return ids

    def shared_tokens(self, messages: Sequence[Message]) -> int:
        """Tokens of the conversation's beginning, before any question."""
        ids = self._tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=False, return_dict=False
        )
        return len(ids)

    def reply(self, messages: Sequence[Message], new_tokens: int) -> Reply:
        """Answer the question that a conversation ends with."""
        started_s = time.perf_counter()
        return self.answer(self.prompt(messages), new_tokens, started_s=started_s)

    def answer(
        self, prompt: Sequence[int], new_tokens: int, *, started_s: float | None = None
    ) -> Reply:
        """Continue a prompt greedily by at most `new_tokens`; times count from `started_s`."""
        import torch

        if started_s is None:
            started_s = time.perf_counter()
        first = FirstTokenTimer()
        ids = torch.tensor([list(prompt)], device=self._model.device)
        served = self._model if self._depot is None else self._depot
        with torch.inference_mode():
            output = served.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new_tokens,
                do_sample=False,
                streamer=first,
            )
        ended_s = time.perf_counter()
        new = output[0, len(prompt) :].tolist()
        return Reply(
            prompt_tokens=len(prompt),
            ids=new,
            text=self._tokenizer.decode(new, skip_special_tokens=True),
            ttft_s=first.at_s - started_s,
            seconds=ended_s - started_s,
            **self._origin(len(prompt)),
        )

    def _origin(self, prompt_tokens: int) -> dict[str, Any]:
        if self._depot is None or not self._depot.last.rows:
            return {"computed_tokens": prompt_tokens}
        last = self._depot.last
        (row,) = last.rows
        computed = row.computed_tokens
        return {
            "fetched": dict(row.fetched),
            "computed_tokens": computed,
            "misses": dict(last.misses),
        }
