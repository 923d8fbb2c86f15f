"""One call that the depot serves, from the lookup to the last block that is stored."""

import inspect
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, StaticCache

from kvdepot.adapters.audit import AuditedHits
from kvdepot.adapters.hf.binding import Binding
from kvdepot.adapters.hf.caches import DepotCache
from kvdepot.adapters.hf.calls import PromptRow, ServableCall, UnservedCall, mask_of, positions_of
from kvdepot.adapters.hf.offloader import GroupSnapshot, Offloader, OffloadJob, OffloadRow
from kvdepot.adapters.hf.onboarder import BatchFetch, PreparedCache
from kvdepot.adapters.hf.stats import CallStats
from kvdepot.adapters.prefill_report import PrefillReport
from kvdepot.adapters.tensors import TensorMover
from kvdepot.depot import Depot
from kvdepot.errors import StoreClosedError
from kvdepot.policy.fetching.speed_models import attention_work

LOG: Final = logging.getLogger("transformers.kvdepot")
"""A logger that transformers prints."""


@dataclass(frozen=True, slots=True)
class ModelParts:
    """A model in one state, and the parts that serve its calls."""

    model: PreTrainedModel
    binding: Binding
    store: Depot
    mover: TensorMover
    hits: AuditedHits
    offloader: Offloader
    timeout_s: float | None
    report: PrefillReport | None
    """Learns how fast a processor computes prompts. None on a GPU, which runs asynchronously."""
    clock: Callable[[], float] = time.perf_counter
    calls: set["ServedCall"] = field(default_factory=set)
    """The calls that are being served."""


class ServedCall:
    """A call's prompts, and the cache that the model uses."""

    def __init__(self, parts: ModelParts, call: ServableCall) -> None:
        self._parts = parts
        self._call = call
        self._opened_s = self._step_s = parts.clock()
        self._measured = 0
        """The columns before the current step."""
        self._saved = 0
        """The columns whose blocks have been given to the offloader."""
        self._prepared = PreparedCache(DepotCache(parts.binding.windows), 0, [])
        self.cache = self._prepared.cache
        self.column = 0
        """The cache is filled up to this column."""
        self.stats = CallStats()

    def open(self) -> None:
        """Fill a cache from the depot, and begin to store what the model adds to the prompts.
        UnservedCall if the depot is closed."""
        parts = self._parts
        batch = BatchFetch(parts.store, parts.binding, parts.mover, self._call.prompts)
        try:
            self._prepared = batch.prepare(
                parts.hits,
                self.stats,
                self._catch_up,
                timeout_s=parts.timeout_s,
                busy=bool(parts.calls),
            )
        except StoreClosedError:
            raise UnservedCall("closed") from None
        parts.calls.add(self)
        self.column = self._measured = self._prepared.column
        self.cache = self._prepared.cache
        if parts.binding.device.type == "cpu":
            self._prepared.close()  # all copies have ended
        if self._call.rows_per_prompt > 1 and self.column:
            self.cache.batch_repeat_interleave(self._call.rows_per_prompt)
        self.cache.after_each_step(self._after_step)
        self._step_s = self._parts.clock()

    def close(self) -> None:
        """Release everything. May be called again."""
        self._parts.calls.discard(self)
        self.cache.end_call()
        self._prepared.close()

    def hand_over(self) -> Cache:
        """The cache for the model: ours, or the caller's with the content of ours."""
        call, given = self._call, self._call.cache
        if call.chunk is not None:
            self.advance(call.ids.shape[1] - 1, call.chunk)
        if call.static_columns is not None:
            config = self._parts.model.config
            given = StaticCache(config=config, max_cache_len=call.static_columns)
        if given is None:
            return self.cache
        if isinstance(given, StaticCache):
            if self.cache.sliding_layers:
                # A static window drops tokens at once: compute the prompt before it is used.
                self.advance(call.ids.shape[1] - 1)
            self.cache.copy_to_static(given, self.column)
            return given
        given.layers = list(self.cache.layers)
        given.layer_class_to_replicate = None
        return given

    def advance(self, stop: int, step: int | None = None) -> None:
        """Run prompts through the model up to column `stop`, `step` columns at a time."""
        prompts, repeats = self._call.prompts, self._call.rows_per_prompt
        device = self._parts.model.device
        mask, positions = mask_of(prompts, device), positions_of(prompts, device)
        ids = torch.zeros_like(positions)
        for row, prompt in enumerate(prompts):
            ids[row, prompt.pad :] = torch.from_numpy(prompt.tokens).to(device)
        if repeats > 1:
            ids, positions = (each.repeat_interleave(repeats, dim=0) for each in (ids, positions))
            mask = None if mask is None else mask.repeat_interleave(repeats, dim=0)
        while self.column < stop:
            end = stop if step is None else min(stop, self.column + step)
            part = slice(self.column, end)
            seen = None if mask is None else mask[:, :end]
            self._forward(self.cache, ids[:, part], positions[:, part], seen)
            self.column = end

    def save(self, sequences: torch.Tensor) -> None:
        """Store what was generated: the tokens in the cache, up to an end token."""
        columns = self.cache.get_seq_length()
        has_new_block = any(
            self._block_start(prompt, columns) > self._block_start(prompt, self._saved)
            for prompt in self._call.prompts
        )
        if has_new_block and self._call.beams == 1:
            self._submit(self.cache, self._sequence_rows(sequences, columns))

    def save_static(self, static: StaticCache, sequences: torch.Tensor) -> None:
        """`save` for a static cache. Waits, since its owner may write to it again."""
        if self.cache.sliding_layers:
            return  # its windows have moved on; the prompts were stored before it was filled
        rows = self._prompt_rows(self._call.ids.shape[1])
        if self._call.beams == 1:
            rows = self._sequence_rows(sequences, int(static.get_seq_length()))
        if self._is_same_model():
            future = self._parts.offloader.submit(self._job(static, rows))
            if future is not None:
                future.exception()

    def _sequence_rows(self, sequences: torch.Tensor, columns: int) -> list[OffloadRow]:
        rows = []
        columns = self._safe_columns(columns)
        for batch, sequence in enumerate(sequences[:, :columns].cpu().numpy().astype(np.int64)):
            number = batch // self._call.rows_per_prompt
            prompt = self._call.prompts[number]
            tokens, count = sequence[prompt.pad :], len(prompt.tokens)
            end = np.flatnonzero(np.isin(tokens[count:], self._call.ends))
            if len(end):  # padding follows the first end token
                tokens = tokens[: count + int(end[0]) + 1]
            first = self._prepared.windows_from[number]
            rows.append(OffloadRow(tokens, prompt.pad, batch, first))
        return rows

    def _prompt_rows(self, columns: int) -> list[OffloadRow]:
        columns = self._safe_columns(columns)
        rows = []
        for number, prompt in enumerate(self._call.prompts):
            tokens = prompt.tokens[: max(0, columns - prompt.pad)]
            batch, first = number * self._call.rows_per_prompt, self._prepared.windows_from[number]
            rows.append(OffloadRow(tokens, prompt.pad, batch, first))
        return rows

    def _catch_up(self, cache: DepotCache, prompt: PromptRow, start: int, stop: int) -> None:
        device = self._parts.model.device
        ids = torch.from_numpy(prompt.tokens[start:stop]).to(device)[None]
        self._forward(cache, ids, torch.arange(start, stop, device=device)[None], None)
        if cache.sliding_layers:
            self._submit(cache, [OffloadRow(prompt.tokens[:stop], 0, 0, start)])

    def _forward(
        self,
        cache: DepotCache,
        ids: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor | None,
    ) -> None:
        model = self._parts.model
        optional = {"position_ids": positions, "logits_to_keep": 1}
        accepted = optional.keys() & inspect.signature(model.forward).parameters.keys()
        arguments: dict[str, Any] = {name: optional[name] for name in accepted}
        if mask is not None:
            arguments["attention_mask"] = mask
        model(input_ids=ids, past_key_values=cache, use_cache=True, **arguments)

    def _measure(self, report: PrefillReport, filled: int) -> None:
        """A step has updated the last layer: nearly all of its work is done."""
        call, now_s = self._call, self._parts.clock()
        rows, new = len(call.prompts) * call.rows_per_prompt, filled - self._measured
        work = attention_work(new, self._measured)
        report.observe(rows * new, rows * work, now_s - self._step_s)
        self._step_s, self._measured = now_s, filled
        fetched = sum(row.fetched_tokens for row in self.stats.rows)
        if filled >= call.ids.shape[1] and len(call.prompts) == 1 and fetched:
            report.report_first_token(call.ids.shape[1], fetched, now_s - self._opened_s)

    def _after_step(self) -> None:
        """A forward has filled the cache. Store the prompts' blocks as long as they grow."""
        filled, columns = self.cache.get_seq_length(), self._call.ids.shape[1]
        if self._parts.report is not None:
            self._measure(self._parts.report, filled)
        if filled >= columns:
            self.cache.after_each_step(None)
        if self._submit(self.cache, self._prompt_rows(min(filled, columns))):
            self._saved = filled
            start = min(self._block_start(prompt, filled) for prompt in self._call.prompts)
            for layer in self.cache.sliding_layers:
                layer.forget(start)
        if filled >= columns and self._call.beams > 1:
            for layer in self.cache.sliding_layers:
                layer.stop_recording()

    def _block_start(self, prompt: PromptRow, columns: int) -> int:
        """The first column of the incomplete block at `columns`."""
        size = self._parts.binding.block_tokens
        return prompt.pad + (columns - prompt.pad) // size * size

    def _safe_columns(self, columns: int) -> int:
        """The columns whose K does not depend on the length of the sequence."""
        limit = self._parts.binding.tokens_max
        if limit is None:
            return columns
        return min(columns, limit + min(prompt.pad for prompt in self._call.prompts))

    def _is_same_model(self) -> bool:
        """Returns False if the weights have changed during the call: their KV has another name."""
        return self._parts.binding.still_holds(self._parts.model)

    def _submit(self, cache: Cache, rows: list[OffloadRow]) -> bool:
        if not self._is_same_model():
            return False
        return self._parts.offloader.submit(self._job(cache, rows)) is not None

    def _job(self, cache: Cache, rows: list[OffloadRow]) -> OffloadJob:
        binding, event = self._parts.binding, None
        snapshots = [GroupSnapshot.of(group, cache.layers) for group in binding.groups]
        if binding.device.type == "cuda":
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(binding.device))
        return OffloadJob(rows, snapshots, event, self._prepared.close)
