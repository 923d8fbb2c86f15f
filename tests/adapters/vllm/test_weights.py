"""Weights are named by every byte of their files; before that nothing is served."""

import json
import os
import shutil
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")

import torch
from tests.support.toy_engine import (
    PROMPT,
    ToyRequest,
    Toys,
    cache_config,
    engine_config,
)

from kvdepot.adapters import file_digests
from kvdepot.adapters.file_digests import process_start_ns
from kvdepot.adapters.vllm import weights
from kvdepot.adapters.vllm.config import ConnectorConfig
from kvdepot.adapters.vllm.groups import layer_groups
from kvdepot.adapters.vllm.identity import shard_facts
from kvdepot.adapters.vllm.loaded_weights import LoadedAdapters, lora_digest
from kvdepot.adapters.vllm.messages import BlockOrigin, StepReport, WorkerRank
from kvdepot.adapters.vllm.namespaces import adapter_of, namespaces
from kvdepot.adapters.vllm.page_transfer import page_tensors
from kvdepot.adapters.vllm.shards import WorkerShard
from kvdepot.adapters.vllm.weights import WeightsDigest, folder_digest
from kvdepot.errors import ModelError

SIZE = 5_000_000
"""More than twice what the digest of samples read of a file."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    made.mkdir()
    (made / "model.safetensors").write_bytes(bytes(range(250)) * (SIZE // 250))
    (made / "config.json").write_text("{}")
    return made


def test_a_copy_is_the_same(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "copy")
    assert folder_digest(folder) == folder_digest(tmp_path / "copy")


def test_a_flip_of_any_byte_shows(tmp_path_factory: pytest.TempPathFactory) -> None:
    made = tmp_path_factory.mktemp("model")
    path = made / "model.safetensors"
    path.write_bytes(bytes(SIZE))
    before = folder_digest(made)

    @settings(max_examples=25, deadline=None)
    @given(at=st.integers(0, SIZE - 1), bit=st.integers(0, 7))
    def flip(at: int, bit: int) -> None:
        with path.open("r+b") as file:
            for value, same in ((1 << bit, False), (0, True)):
                file.seek(at)
                file.write(bytes([value]))
                file.flush()
                assert (folder_digest(made) == before) is same

    flip()


def test_another_config_or_code_shows_and_other_files_do_not(folder: Path) -> None:
    seen = {folder_digest(folder)}
    (folder / "README.md").write_text("hello")
    assert {folder_digest(folder)} == seen
    for name, text in (("config.json", '{"rope_theta": 1}'), ("modeling.py", "x = 1")):
        (folder / name).write_text(text)
        assert folder_digest(folder) not in seen
        seen.add(folder_digest(folder))


def test_a_folder_without_weights_says_so(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no weights"):
        folder_digest(tmp_path)


def test_files_are_read_once(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memo = tmp_path / "cache" / "weights"
    monkeypatch.setattr(file_digests, "_SETTLED_NS", -(10**9))
    first = folder_digest(folder, memo)
    assert memo.stat().st_mode & 0o777 == 0o600
    monkeypatch.setattr(file_digests, "file_digest", lambda _: pytest.fail("read again"))
    assert folder_digest(folder, memo) == first
    monkeypatch.undo()
    os.utime(folder / "config.json")
    path = folder / "model.safetensors"
    with path.open("r+b") as file:
        file.seek(SIZE // 2)
        file.write(b"\xff")
    assert folder_digest(folder, memo) not in ("", first), "by its times it is another file"


def test_a_memo_that_others_can_write_to_is_not_believed(folder: Path, tmp_path: Path) -> None:
    memo = tmp_path / "weights"
    facts = " ".join(map(str, file_digests.file_facts(folder / "model.safetensors")))
    memo.write_text(json.dumps({facts: "forged"}))
    memo.chmod(0o666)
    assert folder_digest(folder, memo) == folder_digest(folder)


def test_a_file_that_was_just_written_is_not_remembered(folder: Path, tmp_path: Path) -> None:
    memo = tmp_path / "weights"
    folder_digest(folder, memo)
    assert memo.read_text() in ("", "{}"), "it may be written to again within its times' resolution"


def test_weights_that_changed_after_the_start_are_not_what_was_loaded(
    folder: Path, tmp_path: Path
) -> None:
    assert process_start_ns() < time.time_ns()
    loaded_before = WeightsDigest(folder, tmp_path / "memo", began_ns=time.time_ns() + 10**9)
    assert loaded_before.wait(20.0) == folder_digest(folder)
    began = time.time_ns() - 10**12
    swapped = WeightsDigest(folder, tmp_path / "memo", began_ns=began)
    assert swapped.wait(20.0) == ""
    assert "has changed since" in swapped.reason


def facts_of(**model: Any) -> Any:
    engine = engine_config()
    vars(engine.model_config).update(model)
    shape = (4, 2, 4, 256)
    cache = cache_config(4)
    (group,) = layer_groups(cache)
    caches = {name: torch.zeros(shape) for name in group.layer_names}
    ((_, tensors),) = page_tensors(caches, group.layer_names, 4)
    place = WorkerRank(0, 1, "v")
    served = (group, tensors, WorkerShard(0, 1))
    return shard_facts(engine, cache, [served], ConnectorConfig(), place)


@pytest.mark.parametrize(
    "setting",
    [{"max_model_len": 8192}, {"disable_sliding_window": True}, {"model_impl": "transformers"}],
)
def test_settings_that_change_kv_are_in_the_namespace(setting: dict[str, Any]) -> None:
    """The length selects LongRoPE's factors, and Llama 4's attention temperature."""
    plain, other = facts_of(max_model_len=4096), facts_of(**{"max_model_len": 4096} | setting)
    config = ConnectorConfig()
    one, two = (namespaces(facts, config, BlockOrigin()) for facts in (plain, other))
    assert one[0][0].tag != two[0][0].tag


def test_nothing_is_served_or_saved_until_the_weights_are_known(
    folder: Path, toys: Toys, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = threading.Event()
    digest = file_digests.file_digest

    def slow(path: Path) -> str:
        assert go.wait(20.0)
        return digest(path)

    monkeypatch.setattr(file_digests, "file_digest", slow)
    monkeypatch.setattr(weights, "process_start_ns", lambda: time.time_ns() + 10**9)
    monkeypatch.setattr("tests.support.toy_engine.MODEL", str(folder))
    engine = toys.engine()
    engine.add(ToyRequest("early", list(PROMPT), 2))
    engine.run()
    assert engine.side.metrics() == {"unserved_requests:weights_unknown": 1}
    assert engine.side._store.stats()["blocks"] == 0
    go.set()
    assert weights.digest_of(folder, ConnectorConfig().weights.expanduser()).wait(20.0)
    engine.add(ToyRequest("late", list(PROMPT), 2))
    engine.run()
    assert engine.side._store.stats()["blocks"] > 0


def lora_model(seed: int, scaling: float = 2.0) -> Any:
    """As vLLM's LoRAModel."""
    generator = torch.Generator().manual_seed(seed)
    layers = {
        name: SimpleNamespace(
            module_name=name,
            rank=4,
            scaling=scaling,
            lora_a=torch.rand(4, 64, generator=generator),
            lora_b=torch.rand(64, 4, generator=generator),
        )
        for name in ("q", "k")
    }
    return SimpleNamespace(loras=layers, modules_to_save={})


def test_every_byte_of_a_lora_counts_as_loaded() -> None:
    first = lora_digest(lora_model(1))
    assert first == lora_digest(lora_model(1))
    assert first != lora_digest(lora_model(1, scaling=1.0))
    other = lora_model(1)
    other.loras["k"].lora_b.view(torch.uint8)[63, 15] ^= 1
    assert first != lora_digest(other)


class ToyLoRAManager:
    """As vLLM's WorkerLoRAManager: loads what lies in the folder at that moment."""

    def _load_adapter(self, request: Any) -> Any:
        return lora_model(int(Path(request.lora_path, "seed").read_text()))


def test_a_lora_is_what_was_loaded_and_not_what_lies_in_its_folder_later(tmp_path: Path) -> None:
    class Manager(ToyLoRAManager):
        pass

    loaded, known = LoadedAdapters(), dict[int, str]()
    loaded.watch(Manager)
    request = SimpleNamespace(lora_name="a", lora_int_id=1, lora_path=str(tmp_path))
    (tmp_path / "seed").write_text("1")
    with pytest.raises(ModelError, match="has not reported"):
        adapter_of(request, known)
    Manager()._load_adapter(request)
    (tmp_path / "seed").write_text("2")
    known.update(loaded.take_fresh())
    first = adapter_of(request, known)
    assert first == f"a {lora_digest(lora_model(1))}"
    assert loaded.has(first.split()[1])
    Manager()._load_adapter(request)
    known.update(loaded.take_fresh())
    assert adapter_of(request, known) == f"a {lora_digest(lora_model(2))}"
    assert not loaded.has(first.split()[1]), "jobs with the old one are refused"
    assert adapter_of(None, known) == ""


def test_workers_that_loaded_different_loras_say_nothing() -> None:
    both = StepReport(adapters={1: "x", 2: "y"}).aggregate(StepReport(adapters={1: "x", 2: "z"}))
    assert both.adapters == {1: "x", 2: ""}


def test_a_request_with_a_lora_is_served_once_it_is_loaded(toys: Toys) -> None:
    engine = toys.engine()
    lora = SimpleNamespace(lora_name="a", lora_int_id=7, lora_path="hub/name")

    def ask(name: str) -> dict[str, float]:
        engine.add(ToyRequest(name, list(PROMPT), 2, cache_salt="a", lora_request=lora))
        engine.run()
        return engine.side.metrics() or {}

    assert ask("first") == {"unserved_requests:adapter": 1}
    engine.workers[0]._loaded.loaded(7, lora_model(1))
    assert "unserved_requests:adapter" in ask("second"), "the report comes with a step"
    assert "unserved_requests:adapter" not in ask("third")
    stored = engine.side._store.stats()["blocks"]
    assert stored > 0
    engine.workers[0]._loaded.loaded(7, lora_model(2))
    ask("fourth")
    ask("fifth")
    assert engine.side._store.stats()["blocks"] > stored, "another namespace"
