"""The prompts of a call: the tokens of each row of a batch, without its padding."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

Tokens = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row: `pad` columns of padding, then the tokens."""

    tokens: Tokens
    pad: int

    @property
    def columns(self) -> int:
        return self.pad + len(self.tokens)


def read_prompts(ids: torch.Tensor, mask: torch.Tensor | None) -> list[Prompt] | None:
    """The rows of [batch, column] token ids; None unless all padding is on the left."""
    rows = ids.detach().cpu().numpy().astype(np.int64)
    pads = [0] * len(rows)
    if mask is not None:
        seen = mask.detach().cpu().numpy() != 0
        pads = [int(row.argmax()) for row in seen]
        if not all(row[pad:].all() for row, pad in zip(seen, pads, strict=True)):
            return None
    return [Prompt(row[pad:], pad) for row, pad in zip(rows, pads, strict=True)]


def mask_of(prompts: list[Prompt], device: torch.device) -> torch.Tensor | None:
    """The attention mask of left-padded prompts; None where nothing is padded."""
    if not any(prompt.pad for prompt in prompts):
        return None
    columns = torch.arange(prompts[0].columns, device=device)
    pads = torch.tensor([prompt.pad for prompt in prompts], device=device)
    return (columns[None] >= pads[:, None]).long()


def positions_of(prompts: list[Prompt], device: torch.device) -> torch.Tensor:
    """The positions of all columns: each row counts from its first token; padding is at 0."""
    columns = torch.arange(prompts[0].columns, device=device)
    pads = torch.tensor([prompt.pad for prompt in prompts], device=device)
    return (columns[None] - pads[:, None]).clamp(min=0)
