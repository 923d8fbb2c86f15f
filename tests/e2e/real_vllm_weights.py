"""Scenarios of a real vLLM whose weights are changed in place, and whose cache is reset."""

import argparse
import json
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.e2e.vllm_bench import Bench, compare, full, write

TOKENS = 12


def other_weights(args: argparse.Namespace) -> dict[str, Any]:
    """The model with larger keys and values, in the folder that `--depot` names."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(args.model, args.depot)
    for path in Path(args.depot).glob("*.safetensors"):
        tensors = load_file(path)
        for name in tensors:
            if "k_proj" in name or "v_proj" in name:
                tensors[name] = tensors[name] * 1.3
        save_file(tensors, path, metadata={"format": "pt"})
    return {}


def double_norms(worker: Any, factor: float = 2.0) -> None:
    """As a user's own update: written into the parameters."""
    for name, parameter in worker.get_model().named_parameters():
        if "input_layernorm" in name:
            parameter.data.mul_(factor)


def reload(bench: Bench, folder: str) -> None:
    bench.llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})


def transfer_from_folders() -> Any:
    """A configuration of vLLM's weight transfer, with a backend that loads a folder."""
    from safetensors.torch import load_file
    from vllm.config import WeightTransferConfig  # type: ignore[import-not-found]
    from vllm.distributed.weight_transfer.base import (  # type: ignore[import-not-found]
        WeightTransferEngine,
        WeightTransferInitInfo,
        WeightTransferUpdateInfo,
    )
    from vllm.distributed.weight_transfer.factory import (  # type: ignore[import-not-found]
        WeightTransferEngineFactory,
    )
    from vllm.model_executor.model_loader import reload  # type: ignore[import-not-found]

    @dataclass
    class WeightsFolder(WeightTransferUpdateInfo):  # type: ignore[misc]
        folder: str

    class FolderTransfer(WeightTransferEngine):  # type: ignore[misc]
        init_info_cls = WeightTransferInitInfo
        update_info_cls = WeightsFolder

        def init_transfer_engine(self, init_info: Any) -> None:
            """There is nothing to connect to."""

        def start_weight_update(self) -> None:
            reload.initialize_layerwise_reload(self.model)

        def update_weights(self, update_info: dict[str, Any]) -> None:
            self.receive_weights(self.parse_update_info(update_info))

        def receive_weights(self, update_info: WeightsFolder) -> None:
            for path in sorted(Path(update_info.folder).glob("*.safetensors")):
                self.model.load_weights(load_file(path).items())

        def finish_weight_update(self) -> None:
            reload.finalize_layerwise_reload(self.model, self.model_config)

        def shutdown(self) -> None:
            """There is nothing to release."""

    WeightTransferEngineFactory.register_engine("folder", FolderTransfer)
    return WeightTransferConfig(backend="folder")


def transfer(bench: Bench, folder: str) -> None:
    bench.llm.collective_rpc("start_weight_update")
    bench.llm.collective_rpc("update_weights", args=({"folder": folder},))
    bench.llm.collective_rpc("finish_weight_update")


def weights_plain(args: argparse.Namespace) -> dict[str, Any]:
    """Without kvdepot: what is right under each of three weights."""
    bench = Bench(args, extra=None)
    other = json.loads(args.extra)["other"]
    prompts = bench.prompts(2, 500)
    changes: dict[str, Callable[[], Any]] = {
        "first": lambda: None,
        "other": lambda: reload(bench, other),
        "doubled": lambda: bench.llm.collective_rpc(double_norms),
    }
    answers = {}
    for name, change in changes.items():
        change()
        bench.forget()
        answers[name] = bench.ask_in_turn(prompts, tokens=TOKENS)
    return {"answers": answers}


def weights_changed(args: argparse.Namespace) -> dict[str, Any]:
    """Reloaded, changed by a user's function, transferred, and back, with resets of both kinds;
    then killed."""
    wanted = json.loads(Path(args.reference).read_text())["answers"]
    bench = Bench(args, weight_transfer_config=transfer_from_folders())
    bench.count()
    other = json.loads(args.extra)["other"]
    prompts = bench.prompts(2, 500)
    cold = [answer["cached"] for answer in wanted["first"]]
    seen: dict[str, Any] = {"full": full(prompts), "cold": cold}

    def asked(name: str, which: str) -> None:
        seen[name] = compare(bench.ask_in_turn(prompts, tokens=TOKENS), wanted[which])

    asked("first weights, cold", "first")
    reload(bench, other)
    bench.forget()
    asked("other weights, cold", "other")
    bench.forget()
    asked("other weights, warm", "other")
    bench.llm.collective_rpc(double_norms)
    bench.forget()
    asked("changed by a function, cold", "doubled")
    bench.llm.collective_rpc(double_norms, args=(0.5,))
    bench.forget()
    asked("changed back by a function, warm", "other")
    reload(bench, args.model)
    bench.forget()
    asked("first weights again, warm", "first")
    transfer(bench, other)
    bench.forget()
    asked("transferred, warm", "other")
    transfer(bench, args.model)
    bench.forget()
    asked("transferred back, warm", "first")
    before = bench.store.stats()["blocks"]
    reload(bench, other)
    seen["reset"] = bench.llm.reset_prefix_cache(reset_connector=True)
    seen["removed by a reset"] = before - bench.store.stats()["blocks"]
    asked("other weights after a reset, cold", "other")
    bench.forget()
    asked("other weights after a reset, warm", "other")
    reload(bench, args.model)
    bench.forget()
    asked("first weights after a reset, cold", "first")
    seen["figures"] = bench.figures()
    bench.store.flush(60.0)
    write(args, seen)
    os.kill(os.getpid(), signal.SIGKILL)
    return seen


def weights_after(args: argparse.Namespace) -> dict[str, Any]:
    """A fresh process with the first weights."""
    wanted = json.loads(Path(args.reference).read_text())["answers"]["first"]
    bench = Bench(args)
    prompts = bench.prompts(2, 500)
    return {
        "full": full(prompts),
        "started again": compare(bench.ask_in_turn(prompts, tokens=TOKENS), wanted),
    }


WEIGHTS = (other_weights, weights_plain, weights_changed, weights_after)
