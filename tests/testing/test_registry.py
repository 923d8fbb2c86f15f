"""Tiers are found by name: ours, and those of installed packages."""

import sys
from pathlib import Path

import pytest

from kvdepot.errors import ConfigError
from kvdepot.testing.twins import MemoryTier
from kvdepot.tiers.log.tier import SegmentTier
from kvdepot.tiers.memory.copy_ops import DramTier
from kvdepot.tiers.registry import find_tier, tier_names


def install(folder: Path, package: str, entries: str) -> None:
    """What pip leaves behind for a package with entry points."""
    info = folder / f"{package}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[kvdepot.tiers]\n{entries}\n")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_built_in_tiers() -> None:
    assert {"dram", "ssd"} <= set(tier_names())
    assert find_tier("dram") is DramTier
    assert find_tier("ssd") is SegmentTier


def test_a_plug_in_is_found_and_not_imported_before_it_is_asked_for(site: Path) -> None:
    install(site, "kvdepot_tape", "tape = kvdepot_tape:TapeTier")
    (site / "kvdepot_tape.py").write_text(
        "from kvdepot.testing.twins import MemoryTier\nclass TapeTier(MemoryTier): name = 'tape'\n"
    )
    assert "tape" in tier_names()
    assert "kvdepot_tape" not in sys.modules
    tier = find_tier("tape")(1 << 20)
    assert isinstance(tier, MemoryTier)
    assert tier.name == "tape"
    del sys.modules["kvdepot_tape"]


def test_an_unknown_name_is_an_error_that_lists_the_known_ones(site: Path) -> None:
    install(site, "kvdepot_tape", "tape = kvdepot_tape:TapeTier")
    with pytest.raises(ConfigError, match="there is no tier 'floppy'") as caught:
        find_tier("floppy")
    assert caught.value.hint == "known tiers: dram, hdd, ssd, tape"


def test_a_plug_in_cannot_take_a_built_in_name(site: Path) -> None:
    install(site, "kvdepot_other", "ssd = nowhere:SsdTier")
    assert find_tier("ssd") is SegmentTier
    assert tier_names().count("ssd") == 1


def test_two_packages_with_one_name(site: Path) -> None:
    install(site, "kvdepot_tape", "tape = kvdepot_tape:TapeTier")
    install(site, "kvdepot_reel", "tape = kvdepot_reel:ReelTier")
    with pytest.raises(ConfigError, match="kvdepot_reel:ReelTier, kvdepot_tape:TapeTier"):
        find_tier("tape")


@pytest.mark.parametrize("target", ["nowhere:Tier", "kvdepot.errors:NoSuchTier"])
def test_a_plug_in_that_cannot_be_loaded(site: Path, target: str) -> None:
    install(site, "kvdepot_broken", f"broken = {target}")
    with pytest.raises(ConfigError, match=f"plug-in {target} cannot be loaded"):
        find_tier("broken")


def test_a_plug_in_that_makes_nothing(site: Path) -> None:
    install(site, "kvdepot_broken", "broken = kvdepot.core.block:KEY_BYTES")
    with pytest.raises(ConfigError, match="is not callable"):
        find_tier("broken")
