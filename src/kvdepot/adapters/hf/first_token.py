"""A model that continues prompts greedily and measures how long its first token takes.

With a depot or without it is the same model in the same dtype, so the two can be compared.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from kvdepot.core.depot import Depot
from kvdepot.core.hf_config import model_layout
from kvdepot.errors import ExtraMissingError, ModelError

_WARM_UP_TOKENS: Final = 256


@dataclass(frozen=True, slots=True)
class TimedAnswer:
    """How one prompt was continued, and where its KV came from."""

    ids: list[int]
    ttft_s: float
    """From the call to the first new token; what a depot looks up and fetches is included."""
    seconds: float
    """Until the call returned."""
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
        """Bytes of KV that one token has in all layers."""
        layout = model_layout(self._model.config.to_dict(), dtype="float32")
        return sum(group.bytes_per_token for group in layout.groups)

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Load from a transformers model folder and run once, so that no first use is slow."""
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
        """Answer from now on with `store`, in place of the one before."""
        from kvdepot.adapters.hf import attach

        self._depot = attach(self._model, store, **settings)

    def detach(self) -> None:
        self._depot = None

    def flush(self) -> None:
        """Wait until all that was computed is in the store."""
        if self._depot is not None:
            self._depot.flush()

    def answer(self, prompt: Sequence[int], new_tokens: int) -> TimedAnswer:
        """Continue a prompt greedily by at most `new_tokens`."""
        import torch

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
        rows = [] if self._depot is None else self._depot.last.rows
        return TimedAnswer(
            ids=output[0, len(prompt) :].tolist(),
            ttft_s=first.at_s - started_s,
            seconds=ended_s - started_s,
            fetched=dict(rows[0].fetched) if rows else {},
        )
