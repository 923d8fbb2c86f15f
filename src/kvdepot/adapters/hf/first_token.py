"""A model that continues prompts greedily and measures the time to the first token."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from kvdepot.core.hf_config import model_layout
from kvdepot.depot import Depot
from kvdepot.errors import ExtraMissingError, ModelError

_WARM_UP_TOKENS: Final = 256


@dataclass(frozen=True, slots=True)
class TimedAnswer:
    ids: list[int]
    ttft_s: float
    """Time from the call to the first new token, with the lookup and the fetch."""
    seconds: float
    """Time until the call returned."""
    fetched: dict[str, int]
    """Prompt tokens from each tier; empty without a depot."""


class FirstTokenTimer:
    """A streamer. `generate` passes it the prompt first, and then each new token."""

    def __init__(self) -> None:
        self._seen = 0
        self.at_s = 0.0

    def put(self, value: Any) -> None:
        self._seen += 1
        if self._seen == 2:
            self.at_s = time.perf_counter()

    def end(self) -> None: ...


class TimedModel:
    """A causal language model in float32, on the GPU if there is one.

    float32 because greedy answers are compared: with 8 bits of mantissa the two best tokens often
    tie, and then the order of a sum decides.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._depot: Any = None
        self.vocabulary: int = model.config.vocab_size
        self.context_tokens: int = getattr(model.config, "max_position_embeddings", 1 << 20)

    @property
    def token_bytes(self) -> int:
        """Bytes of KV per token, in all layers."""
        layout = model_layout(self._model.config.to_dict(), dtype="float32")
        return sum(group.bytes_per_token for group in layout.groups)

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Load a transformers model folder, and run the model once to warm it up."""
        try:
            import torch
            from transformers import AutoModelForCausalLM
            from transformers.utils import logging
        except ImportError as error:
            raise ExtraMissingError("demo", error.name or "transformers") from error
        if not (folder / "config.json").is_file():
            raise ModelError(f"{folder} is not a model folder: it has no config.json")
        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        try:
            model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        except (OSError, ValueError) as error:
            raise ModelError(f"{folder} cannot be loaded: {error}") from error
        if torch.cuda.is_available():
            model = model.to("cuda")
        timed = cls(model.eval())
        timed.answer([1 + number % 64 for number in range(_WARM_UP_TOKENS)], 2)
        return timed

    def attach(self, store: Depot, **settings: Any) -> None:
        """Answer with `store` from now on."""
        from kvdepot.adapters.hf import attach

        self._depot = attach(self._model, store, **settings)

    def detach(self) -> None:
        self._depot = None

    def flush(self) -> None:
        """Wait until the store has all KV that was computed."""
        if self._depot is not None:
            self._depot.flush()

    def answer(self, prompt: Sequence[int], new_tokens: int) -> TimedAnswer:
        """Continue a prompt greedily by at most `new_tokens`."""
        import torch

        started_s = time.perf_counter()
        timer = FirstTokenTimer()
        ids = torch.tensor([list(prompt)], device=self._model.device)
        served = self._model if self._depot is None else self._depot
        with torch.inference_mode():
            output = served.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new_tokens,
                do_sample=False,
                streamer=timer,
            )
        seconds = time.perf_counter() - started_s
        rows = [] if self._depot is None else self._depot.last.rows
        fetched = dict(rows[0].fetched) if rows else {}
        ids, ttft_s = output[0, len(prompt) :].tolist(), timer.at_s - started_s
        return TimedAnswer(ids, ttft_s, seconds, fetched)
