"""vLLM's tiered offloading on its CPU platform, which vLLM itself refuses. For tests only.

The pages and the CPU tier are both ordinary memory here, so a copy between them is a memmove.
Loaded by vLLM: `"spec_name": "CpuTieringSpec"`, `"spec_module_path":
"tests.e2e.cpu_tiering_spec"`. Everything but the worker is vLLM's own.
"""

import ctypes
import time
from typing import Any

import numpy as np
import torch
from vllm.v1.kv_offload.base import (  # type: ignore[import-not-found]
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import (  # type: ignore[import-not-found]
    SharedOffloadRegion,
)
from vllm.v1.kv_offload.tiering.spec import (  # type: ignore[import-not-found]
    TieringOffloadingSpec,
)


class MemoryWorker(OffloadingWorker):  # type: ignore[misc]
    """Copies pages to and from rows of the CPU tier, in the calling thread."""

    def __init__(self, caches: Any, pages_per_chunk: int, region: Any) -> None:
        self._per_chunk = pages_per_chunk
        self._region = region
        self._groups = caches.group_data_refs
        self._pages: list[Any] = [
            one.tensor.view(torch.int8).view((-1, one.page_size_bytes)) for one in caches.tensors
        ]
        self._rows: list[Any] = [
            region.create_next_worker_view(one.page_size_bytes * pages_per_chunk)
            for one in caches.tensors
        ]
        self._done: list[Any] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, src_spec, dst_spec, to_rows=True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, dst_spec, src_spec, to_rows=False)

    def get_finished(self) -> list[Any]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: Any) -> None:
        """Copies are over when they were submitted."""

    def shutdown(self) -> None:
        self._pages = self._rows = []
        self._region.cleanup()

    def _copy(self, job: int, pages: Any, rows: Any, *, to_rows: bool) -> bool:
        started, nbytes, page_at, row_at = time.perf_counter(), 0, 0, 0
        for group, (count, first) in enumerate(
            zip(pages.group_sizes, pages.block_indices, strict=True)
        ):
            if not count:
                continue
            skipped = first % self._per_chunk
            places = np.arange(skipped, skipped + count)
            chunks = places // self._per_chunk
            of_pages = pages.block_ids[page_at : page_at + count]
            of_rows = rows.block_ids[row_at:][chunks]
            page_at, row_at = page_at + count, row_at + int(chunks[-1]) + 1
            for part in self._groups[group]:
                size = part.page_size_bytes
                page, row = self._pages[part.tensor_idx], self._rows[part.tensor_idx]
                if self._per_chunk == 1:  # one indexed copy a layer, not one call a page
                    here, there = row.numpy()[:, :size], page.numpy()[:, :size]
                    if to_rows:
                        here[of_rows] = there[of_pages]
                    else:
                        there[of_pages] = here[of_rows]
                    nbytes += count * size
                    continue
                for number, chunk, place in zip(of_pages, of_rows, places, strict=True):
                    there = page.data_ptr() + int(number) * page.stride(0)
                    here = row.data_ptr() + int(chunk) * row.stride(0)
                    here += int(place) % self._per_chunk * (row.shape[1] // self._per_chunk)
                    source, target = (there, here) if to_rows else (here, there)
                    ctypes.memmove(target, source, size)
                nbytes += count * size
        self._done.append(TransferResult(job, True, nbytes, time.perf_counter() - started))
        return True


class CpuTieringSpec(TieringOffloadingSpec):  # type: ignore[misc]
    """vLLM's spec, with a worker that needs no GPU."""

    _worker: Any

    def get_worker(self, kv_caches: Any) -> Any:
        if not self._worker:
            rank = 0 if self.replicated_layout else self.config.parallel.rank
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            region.base_tensor.zero_()  # a GPU's worker page-locks the whole tier
            self._worker = MemoryWorker(kv_caches, self.blocks_per_chunk, region)
        return self._worker
