"""`kvdepot demo`: it tells the truth when all is well, and when it is not."""

import json
from pathlib import Path

import pytest

from kvdepot.cli import demo, demo_scenes
from kvdepot.cli.demo_scenes import LAYOUT, Scene
from kvdepot.cli.main import main
from kvdepot.core.block import MISS, BlockKey, Got

STEPS = 11


@pytest.mark.slow
@pytest.mark.crash
def test_demo_ends_well_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "--path", str(tmp_path), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["ok"]
    assert len(answer["steps"]) == STEPS
    assert sum(step["from_ssd"] for step in answer["steps"]) > 0
    assert sum(step["from_dram"] for step in answer["steps"]) > 0
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_step_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = Scene("a step", blocks=1)
    bad.expect(False, "wrong bytes in block 00")
    monkeypatch.setattr(demo, "play", lambda *_: [bad])
    assert main(["demo", "--path", str(tmp_path), "--seed", "7"]) == 1
    shown = capsys.readouterr().out
    assert "WRONG" in shown
    assert "wrong: wrong bytes in block 00" in shown
    assert "--seed 7" in shown


def test_keep_leaves_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "play", lambda *_: [Scene("a step", blocks=1)])
    assert main(["demo", "--path", str(tmp_path), "--keep"]) == 0
    (kept,) = tmp_path.iterdir()
    assert str(kept) in capsys.readouterr().err


def test_too_little_room_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "NEEDED_BYTES", 1 << 62)
    assert main(["demo", "--path", str(tmp_path)]) == 2
    assert "hint: give one with --path" in capsys.readouterr().err


def test_scene_counts_where_blocks_came_from() -> None:
    scene = Scene("x", seconds=1.0)
    scene.count([Got("dram"), Got("ssd"), Got("ssd"), MISS])
    assert (scene.blocks, scene.from_dram, scene.from_ssd, scene.missed) == (4, 1, 2, 1)
    assert scene.gb_per_s == pytest.approx(3 * LAYOUT.block_bytes / 1e9)


def test_contents_follow_from_the_key() -> None:
    one, other = BlockKey(bytes(32)), BlockKey(bytes(31) + b"\1")
    assert (demo_scenes.contents(one) == demo_scenes.contents(one)).all()
    assert (demo_scenes.contents(one) != demo_scenes.contents(other)).any()


def test_record_is_found_by_its_head_only(tmp_path: Path) -> None:
    key = BlockKey(bytes(range(32)))
    file = tmp_path / "segment-000000.kvs"
    record = bytes(16) + key + bytes(4096 - 48)
    footer = bytes(100) + key + bytes(4096 - 132)
    file.write_bytes(bytes(4096) + record + footer)
    assert list(demo_scenes.find_record(file, key)) == [(file, 4096)]
    demo_scenes.flip_bit(file, 4096)
    assert file.read_bytes()[4096] == 1
