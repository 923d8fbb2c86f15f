"""One call that the depot serves, from the lookup to the last block offloaded."""

import inspect
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, StaticCache

from kvdepot.adapters.hf.binding import Binding
from kvdepot.adapters.hf.caches import DepotCache
from kvdepot.adapters.hf.calls import PromptRow, mask_of, positions_of
from kvdepot.adapters.hf.offloader import GroupSnapshot, Offloader, OffloadJob, OffloadRow
from kvdepot.adapters.hf.onboarder import Onboarder, PreparedCache
from kvdepot.adapters.hf.prefill_meter import PrefillMeter
from kvdepot.adapters.hf.stats import CallStats


@dataclass(frozen=True, slots=True)
class ModelParts:
    """A model in one state, and what moves its blocks."""

    model: PreTrainedModel
    binding: Binding
    onboarder: Onboarder
    offloader: Offloader
    meter: PrefillMeter


class ServedCall:
    """A call's prompts, and the cache that the model works on."""

    def __init__(
        self, parts: ModelParts, prompts: list[PromptRow], expand: int = 1, beams: int = 1
    ) -> None:
        self._model = parts.model
        self._binding = parts.binding
        self._onboarder = parts.onboarder
        self._offloader = parts.offloader
        self._meter = parts.meter
        self._opened_s = self._step_s = 0.0
        self._times_steps = parts.binding.device.type == "cpu" and parts.meter.times_steps
        self._prompts = prompts
        self._expand = expand
        self._beams = beams
        self._columns = prompts[0].columns
        self._prepared: PreparedCache | None = None
        self._windows_from = [0] * len(prompts)
        self._measured = 0
        """The columns that were there before the step that is timed."""
        self._saved = 0
        """The columns whose blocks have been offloaded, or are about to be."""
        self.cache = DepotCache.of(self._binding.windows)
        self.column = 0
        """How far the cache is filled."""
        self.stats = CallStats()

    def counted(self) -> AbstractContextManager[None]:
        """While it lasts the model is busy."""
        return self._onboarder.audit.call()

    def open(self) -> None:
        """Fill a cache from the depot and begin to save what the model adds to the prompts."""
        self._opened_s = self._meter.clock()
        self._prepared = self._onboarder.prepare(self._prompts, self.stats, self._catch_up)
        self._windows_from = self._prepared.windows_from
        self.column = self._prepared.column
        self.cache = self._prepared.cache
        if self._binding.device.type == "cpu":
            self._prepared.close()  # nothing is under way
        if self._expand > 1 and self.column:
            self.cache.batch_repeat_interleave(self._expand)
        self._measured = self.column
        self.cache.after_each_step(self._after_step)
        if self._times_steps:
            self.cache.before_each_step(self._begin_step)

    def close(self) -> None:
        """Let go of everything. May be called again."""
        self.cache.end_call()
        if self._prepared is not None:
            self._prepared.close()

    def hand_over(self, given: Cache | None, static_columns: int | None = None) -> Cache:
        """The cache for the model: ours, or the caller's with all in it that ours has."""
        if static_columns is not None:
            given = StaticCache(config=self._model.config, max_cache_len=static_columns)
        if given is None:
            return self.cache
        if isinstance(given, StaticCache):
            if self.cache.sliding_layers:
                # A static window forgets at once: what is to be saved is computed beside it.
                self.advance(self._columns - 1)
            self.cache.copy_to_static(given, self.column)
            return given
        given.layers = list(self.cache.layers)
        given.layer_class_to_replicate = None
        return given

    def advance(self, stop: int, step: int | None = None) -> None:
        """Run prompts through the model up to column `stop`, `step` columns at a time."""
        device = self._model.device
        mask, positions = mask_of(self._prompts, device), positions_of(self._prompts, device)
        ids = torch.zeros((len(self._prompts), self._columns), dtype=torch.long, device=device)
        for row, prompt in enumerate(self._prompts):
            ids[row, prompt.pad :] = torch.from_numpy(prompt.tokens).to(device)
        if self._expand > 1:
            ids, positions = (
                tensor.repeat_interleave(self._expand, dim=0) for tensor in (ids, positions)
            )
            mask = None if mask is None else mask.repeat_interleave(self._expand, dim=0)
        while self.column < stop:
            end = stop if step is None else min(stop, self.column + step)
            part = slice(self.column, end)
            seen = None if mask is None else mask[:, :end]
            self._forward(self.cache, ids[:, part], positions[:, part], seen)
            self.column = end

    def save_generated(self, sequences: torch.Tensor, ends: tuple[int, ...]) -> None:
        """Offload what was generated: the tokens that are in the cache, up to an end token."""
        columns = self.cache.get_seq_length()
        new = any(
            self._block_start(prompt, columns) > self._block_start(prompt, self._saved)
            for prompt in self._prompts
        )
        if new and self._beams == 1:
            self._submit(self.cache, self._sequence_rows(sequences, ends, columns))

    def save_static(self, static: Cache, sequences: torch.Tensor, ends: tuple[int, ...]) -> None:
        """The same for a static cache, which its owner may write to again: waits."""
        if self.cache.sliding_layers:
            return  # its windows have moved on; the prompts were saved before it was filled
        if self._beams == 1:
            rows = self._sequence_rows(sequences, ends, int(static.get_seq_length()))
        else:
            rows = self._prompt_rows(self._columns)
        if not self._is_same_model():
            return
        job = OffloadJob(rows, self._snapshots(static), self._event())
        future = self._offloader.submit(job)
        if future is not None:
            future.exception()

    def _sequence_rows(
        self, sequences: torch.Tensor, ends: tuple[int, ...], columns: int
    ) -> list[OffloadRow]:
        rows = []
        columns = self._safe_columns(columns)
        for batch, sequence in enumerate(sequences[:, :columns].cpu().numpy().astype(np.int64)):
            number = batch // self._expand
            prompt, tokens = self._prompts[number], sequence[self._prompts[number].pad :]
            end = np.flatnonzero(np.isin(tokens[len(prompt.tokens) :], ends))
            if len(end):  # what follows the first end token is padding
                tokens = tokens[: len(prompt.tokens) + int(end[0]) + 1]
            rows.append(OffloadRow(tokens, prompt.pad, batch, self._windows_from[number]))
        return rows

    def _prompt_rows(self, columns: int) -> list[OffloadRow]:
        columns = self._safe_columns(columns)
        rows = []
        for number, prompt in enumerate(self._prompts):
            tokens = prompt.tokens[: max(0, columns - prompt.pad)]
            batch, solid = number * self._expand, self._windows_from[number]
            rows.append(OffloadRow(tokens, prompt.pad, batch, solid))
        return rows

    def _catch_up(self, cache: DepotCache, prompt: PromptRow, start: int, stop: int) -> None:
        device = self._model.device
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
        optional = {"position_ids": positions, "logits_to_keep": 1}
        accepted = optional.keys() & inspect.signature(self._model.forward).parameters.keys()
        arguments: dict[str, Any] = {name: optional[name] for name in accepted}
        if mask is not None:
            arguments["attention_mask"] = mask
        self._model(input_ids=ids, past_key_values=cache, use_cache=True, **arguments)

    def _begin_step(self) -> None:
        self._step_s = self._meter.clock()

    def _measure(self, filled: int) -> None:
        """The last layer of a step's forward is reached."""
        now_s, rows = self._meter.clock(), len(self._prompts) * self._expand
        self._meter.step(rows, filled - self._measured, self._measured, now_s - self._step_s)
        self._measured = filled
        fetched = sum(row.fetched_tokens for row in self.stats.rows)
        if filled >= self._columns:
            self.cache.before_each_step(None)
            if len(self._prompts) == 1 and fetched:
                self._meter.answered(self._columns, fetched, now_s - self._opened_s)

    def _after_step(self) -> None:
        """A forward has filled the cache. While it is the prompts': save them."""
        filled = self.cache.get_seq_length()
        if self._times_steps:
            self._measure(filled)
        if filled >= self._columns:
            self.cache.after_each_step(None)
        rows = self._prompt_rows(min(filled, self._columns))
        if self._submit(self.cache, rows):
            self._saved = filled
            self.cache.forget(min(self._block_start(prompt, filled) for prompt in self._prompts))
        if filled >= self._columns and self._beams > 1:
            for layer in self.cache.sliding_layers:
                layer.stop_recording()

    def _block_start(self, prompt: PromptRow, columns: int) -> int:
        """The column where the block begins that is not complete yet."""
        size = self._binding.block_tokens
        return prompt.pad + (columns - prompt.pad) // size * size

    def _safe_columns(self, columns: int) -> int:
        """Those whose K does not depend on how long the sequence has become."""
        if self._binding.tokens_max is None:
            return columns
        return min(columns, self._binding.tokens_max + min(prompt.pad for prompt in self._prompts))

    def _is_same_model(self) -> bool:
        """Whether the weights are those of the call's begin: others' KV has another name."""
        return self._binding.still_holds(self._model)

    def _submit(self, cache: DepotCache, rows: list[OffloadRow]) -> bool:
        if not self._is_same_model():
            return False
        first = None if self._prepared is None else self._prepared.close
        job = OffloadJob(rows, self._snapshots(cache), self._event(), first)
        return self._offloader.submit(job) is not None

    def _snapshots(self, cache: Cache) -> list[GroupSnapshot]:
        return [GroupSnapshot.of(group, cache.layers) for group in self._binding.groups]

    def _event(self) -> torch.cuda.Event | None:
        if self._binding.device.type != "cuda":
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._binding.device))
        return event
