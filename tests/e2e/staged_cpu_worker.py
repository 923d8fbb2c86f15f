"""vLLM's worker for pipeline stages on a CPU. For tests only.

With `--enforce-eager` vLLM 0.32 skips the warm-up of its CPU worker, in which a stage after the
first makes room for what the stage before it sends; the first request then ends the engine, without
kvdepot too. Loaded by vLLM: `--worker-cls tests.e2e.staged_cpu_worker.StagedCPUWorker`.
"""

from typing import Any

from vllm.distributed.parallel_state import (  # type: ignore[import-not-found]
    get_pp_group,
)
from vllm.v1.worker.cpu_worker import CPUWorker  # type: ignore[import-not-found]


class StagedCPUWorker(CPUWorker):  # type: ignore[misc]
    """Makes that room after the model is loaded."""

    def load_model(self, *args: Any, **more: Any) -> None:
        super().load_model(*args, **more)
        runner = self.model_runner
        if not get_pp_group().is_first_rank:
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device="cpu"
            )
