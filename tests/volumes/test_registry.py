"""Volumes of other packages are found by name and opened as configured."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvdepot.config.settings import PluginConfig
from kvdepot.errors import ConfigError
from kvdepot.testing.fakes import CONTEXT
from kvdepot.volumes.registry import find_plugin, open_plugin, plugin_names


def install(folder: Path, package: str, entries: str) -> None:
    """What pip leaves behind for a package with entry points."""
    info = folder / f"{package}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[kvdepot.volumes]\n{entries}\n")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.fixture
def tape(site: Path) -> Iterator[Path]:
    """An installed package with a volume."""
    install(site, "kvdepot_tape", "tape = kvdepot_tape:open_tape")
    (site / "kvdepot_tape.py").write_text(
        "from kvdepot.testing.fakes import MemoryVolume\n"
        "def open_tape(config, context):\n"
        "    if not context.writable:\n"
        "        raise PermissionError(13, 'it is locked')\n"
        "    return MemoryVolume(config.capacity, label=config.options['reel'])\n"
        "def broken(config, context):\n"
        "    return object()\n"
    )
    yield site
    sys.modules.pop("kvdepot_tape", None)


def config(name: str) -> PluginConfig:
    return PluginConfig(name=name, capacity=1 << 20, options={"reel": "first"})


@pytest.mark.usefixtures("tape")
def test_a_plug_in_is_found_and_not_imported_before_it_is_asked_for() -> None:
    assert "tape" in plugin_names()
    assert "kvdepot_tape" not in sys.modules
    assert find_plugin("tape") is find_plugin("kvdepot_tape:open_tape")


@pytest.mark.usefixtures("tape")
@pytest.mark.parametrize("name", ["tape", "kvdepot_tape:open_tape"])
def test_a_plug_in_is_opened_as_configured(name: str) -> None:
    facts = open_plugin(config(name), CONTEXT).facts()
    assert (facts.label, facts.capacity_bytes) == ("first", 1 << 20)


@pytest.mark.usefixtures("tape")
def test_a_plug_in_that_cannot_be_opened() -> None:
    with pytest.raises(ConfigError, match=r"tape cannot be opened: .*it is locked"):
        open_plugin(config("tape"), replace(CONTEXT, writable=False))
    with pytest.raises(ConfigError, match="is not a volume: it lacks append, close"):
        open_plugin(config("kvdepot_tape:broken"), CONTEXT)


def test_an_unknown_name_is_an_error_that_lists_the_known_ones(site: Path) -> None:
    install(site, "kvdepot_tape", "tape = kvdepot_tape:TapeVolume")
    with pytest.raises(ConfigError, match="there is no plug-in volume 'floppy'") as caught:
        find_plugin("floppy")
    assert caught.value.hint == "known: tape"


def test_two_packages_with_one_name(site: Path) -> None:
    install(site, "kvdepot_tape", "tape = kvdepot_tape:TapeVolume")
    install(site, "kvdepot_reel", "tape = kvdepot_reel:ReelVolume")
    with pytest.raises(ConfigError, match="kvdepot_reel:ReelVolume, kvdepot_tape:TapeVolume"):
        find_plugin("tape")


@pytest.mark.parametrize("target", ["nowhere:Volume", "kvdepot.errors:NoSuchVolume"])
def test_a_plug_in_that_cannot_be_loaded(site: Path, target: str) -> None:
    install(site, "kvdepot_broken", f"broken = {target}")
    with pytest.raises(ConfigError, match=f"plug-in {target} cannot be loaded"):
        find_plugin("broken")


def test_a_plug_in_that_makes_nothing(site: Path) -> None:
    install(site, "kvdepot_broken", "broken = kvdepot.core.block:KEY_BYTES")
    with pytest.raises(ConfigError, match="is not callable"):
        find_plugin("broken")
