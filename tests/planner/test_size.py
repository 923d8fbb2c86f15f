"""`kvdepot size`: what it prints, and how mistakes are told."""

import json
from pathlib import Path

import pytest

from kvdepot.cli.main import main
from kvdepot.errors import ConfigError
from kvdepot.planner.footprint import find_codec, footprint_of
from kvdepot.planner.models import KNOWN_MODELS, find_model
from kvdepot.planner.retention import retention

Seen = pytest.CaptureFixture[str]


def test_a_config_file_gives_what_its_name_gives(tmp_path: Path, capsys: Seen) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(dict(find_model("qwen2.5-7b").config)))
    answers = []
    for model in ("qwen2.5-7b", str(path), str(tmp_path)):
        assert main(["size", "--model", model, "--json"]) == 0
        answers.append(json.loads(capsys.readouterr().out))
    for answer in answers:
        del answer["model"], answer["source"]
    assert answers[0] == answers[1] == answers[2]


@pytest.mark.parametrize(
    "name",
    [
        "Llama-3.1-8B-Instruct",
        "meta-llama/Llama-3.1-8B",
        "llama3.1-8b",
        "LLAMA 3.1 8B",
        "llama_3_8b",
    ],
)
def test_names_are_found_as_people_write_them(name: str) -> None:
    assert find_model(name).name == "Llama-3.1-8B"


def test_every_known_model_has_a_size() -> None:
    for known in KNOWN_MODELS:
        model = find_model(known.repository)
        assert footprint_of(model).bytes_per_token > 0
        assert all(cost.pair_flops > 0 for cost in model.attention_costs())
        assert known.active_parameters and known.parameters
        assert known.active_parameters <= known.parameters
    assert len({known.name for known in KNOWN_MODELS}) == len(KNOWN_MODELS)
    assert {known.family for known in KNOWN_MODELS} == {"dense", "moe", "sliding", "mla", "hybrid"}


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"model_type": "telepathy"}, "model_type"),
        ({"model_type": "llama", "dtype": "float16", "n_layer": 4}, "num_attention_heads"),
        ({"num_hidden_layers": 4}, "model_type"),
        ({"model_type": "gpt_oss", "dtype": "bfloat16", "num_hidden_layers": 2}, "layer_types"),
    ],
)
def test_a_config_that_is_not_understood(
    config: dict[str, object], field: str, tmp_path: Path, capsys: Seen
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert main(["size", "--model", str(path)]) == 2
    assert capsys.readouterr().err.startswith(f"error: {field}:")


def test_shards() -> None:
    eight = footprint_of(find_model("llama-3-70b"), tp=4)
    assert eight.gpu_bytes_per_token == eight.bytes_per_token // 4
    latent = footprint_of(find_model("deepseek-r1"), tp=8)
    assert latent.gpu_bytes_per_token == latent.bytes_per_token
    more_shards_than_heads = footprint_of(find_model("qwen2.5-7b"), tp=4 * 7)
    assert more_shards_than_heads.gpu_bytes_per_token == 28 * 256 * 2


def test_windows_stop_growing() -> None:
    windowed = footprint_of(find_model("gpt-oss-20b"))
    layer = 8 * 128 * 2  # 8 heads, 64 elements of K and of V, 2 bytes
    assert windowed.bytes_per_token == 24 * layer
    assert windowed.growth_bytes_per_token == 12 * layer
    assert windowed.context_bytes(100_000) == 12 * layer * 100_000 + 12 * layer * 128


def test_codecs() -> None:
    model = find_model("llama-3-8b")
    whole = footprint_of(model).bytes_per_token
    assert footprint_of(model, codec="fp8").stored_bytes_per_token * 2 == whole
    assert footprint_of(model, codec="1.4").stored_bytes_per_token == pytest.approx(whole / 1.4)
    assert footprint_of(model, dtype="fp8_e4m3").bytes_per_token * 2 == whole
    narrow = footprint_of(model, dtype="fp8_e4m3", codec="fp8")
    assert narrow.stored_bytes_per_token == narrow.bytes_per_token
    with pytest.raises(ConfigError, match="ratio"):
        find_codec("nan")


def test_states_are_stored_as_they_are() -> None:
    hybrid = footprint_of(find_model("jamba-1.5-mini"), codec="fp8")
    attention = 4 * 8 * 256 * 2 * 1000
    assert hybrid.stored_context_bytes(1000) == attention / 2 + hybrid.state_bytes


def test_retention_is_capacity_over_rate() -> None:
    kept = retention("ssd", 86_400 * 10**6, 1000.0, 1000.0)
    assert (kept["days"], kept["hours"], kept["minutes"]) == (1.0, 24.0, 1440.0)
    assert kept["tokens"] == 86_400 * 10**3


def test_people_get_tables(capsys: Seen) -> None:
    assert main(["size", "--model", "gpt-oss-20b", "--tp", "4", "--codec", "fp8"]) == 0
    shown = capsys.readouterr().out
    for word in ("token on one of 4 GPUs", "window", "minutes", "10,000", "stored as"):
        assert word in shown
    assert main(["size", "--models"]) == 0
    assert "huggingface.co/openai/gpt-oss-20b" in capsys.readouterr().out
