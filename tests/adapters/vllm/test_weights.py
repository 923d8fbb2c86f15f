"""Weights are told apart by their content, wherever they lie."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

from kvdepot.adapters.vllm.identity import adapter_of, folder_digest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    made.mkdir()
    (made / "model.safetensors").write_bytes(bytes(range(256)) * 20_000)
    (made / "config.json").write_text("{}")
    return made


def test_a_copy_is_the_same(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "copy")
    assert folder_digest(folder) == folder_digest(tmp_path / "copy")


@pytest.mark.parametrize("at", [0, 1 << 19, -1])
def test_other_content_shows(folder: Path, at: int) -> None:
    before = folder_digest(folder)
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[at] ^= 1
    (folder / "model.safetensors").write_bytes(content)
    assert folder_digest(folder) != before


def test_new_weights_show_in_the_samples(folder: Path) -> None:
    before = folder_digest(folder)
    path = folder / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[: 2 << 20] + bytes(len(content) - (2 << 20)))
    assert folder_digest(folder) != before


def test_another_config_shows_and_other_files_do_not(folder: Path) -> None:
    before = folder_digest(folder)
    (folder / "README.md").write_text("hello")
    assert folder_digest(folder) == before
    (folder / "config.json").write_text('{"rope_theta": 1}')
    assert folder_digest(folder) != before


def test_a_folder_without_weights_says_so(tmp_path: Path) -> None:
    assert folder_digest(tmp_path) == ""


def test_adapters_are_told_apart_by_name_and_content(folder: Path) -> None:
    def lora(name: str, path: Path) -> SimpleNamespace:
        return SimpleNamespace(lora_name=name, lora_path=str(path))

    assert adapter_of(None) == ""
    first = adapter_of(lora("a", folder))
    assert first != adapter_of(lora("b", folder))
    (folder / "model.safetensors").write_bytes(b"other")
    assert first != adapter_of(lora("a", folder))
    assert adapter_of(lora("a", Path("hub/name"))) == "a hub/name"
