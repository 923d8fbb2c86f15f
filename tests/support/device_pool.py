"""A device pool as SGLang's DevicePoolEntry describes it; without SGLang."""

from collections.abc import Sequence
from typing import Any

import torch

PAGE = 4
PAGES = 12
Mapping = dict[int, int | tuple[int, ...]]


class DevicePool:
    """Buffers for `widths` elements of a token, K and V of each layer by default."""

    def __init__(
        self,
        seed: int,
        *,
        device: str = "cpu",
        widths: Sequence[int] = (32, 32, 32, 32, 32, 32),
        layers: Mapping | None = None,
        paged: bool = False,
        dtype: torch.dtype = torch.float16,
    ) -> None:
        chance = torch.Generator().manual_seed(seed)
        rows = (PAGES, PAGE) if paged else (PAGES * PAGE,)
        self.name, self.page_size, self.device_pool = "kv", PAGE, self
        self.kv_buffer = [
            torch.randint(0, 999, (*rows, width), generator=chance).to(dtype).to(device)
            for width in widths
        ]
        self.components = [self.kv_buffer]
        half = len(widths) // 2
        self.layer_mapping: Mapping = layers or {at: (at, half + at) for at in range(half)}
        self.span = 1 if paged else PAGE
        self.buffer_meta = [
            [
                (
                    one.data_ptr(),
                    one.stride(0) * one.element_size(),
                    one.nbytes // one.shape[0] * self.span,
                )
                for one in self.kv_buffer
            ]
        ]

    def prepare_locations(self, indices: Any) -> list[int]:
        first = indices[::PAGE]
        rows: list[int] = (first // PAGE if self.span == 1 else first).tolist()
        return rows

    def page(self, number: int) -> list[torch.Tensor]:
        """The bytes of a page, buffer by buffer."""
        start = number * self.span
        return [one[start : start + self.span].cpu().view(torch.uint8) for one in self.kv_buffer]

    def has(self, number: int, other: "DevicePool", there: int) -> bool:
        return all(map(torch.equal, self.page(number), other.page(there)))


def indices(numbers: Sequence[int]) -> Any:
    """Of the tokens of these pages."""
    return torch.tensor([at * PAGE + token for at in numbers for token in range(PAGE)])
