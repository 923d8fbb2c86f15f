"""`kvdepot check` and `kvdepot inspect`: what they print, and how they exit."""

import json
from pathlib import Path

import pytest

import kvdepot
from kvdepot.cli.check import SHOWN_MAX
from kvdepot.cli.main import main
from kvdepot.core.layout import KVLayout
from kvdepot.store.store import Store

Seen = pytest.CaptureFixture[str]
BLOCKS = 40
BLOCK_BYTES = 4096
SECRET = b"tell nobody about this one"


def open_store(path: Path) -> Store:
    return kvdepot.open(
        dram={"capacity": "1MiB", "huge_pages": "never", "prefault": False},
        ssd={"path": str(path), "capacity": "4MiB", "segment": "64KiB"},
        writeback={"staging": "1MiB"},
    )


@pytest.fixture
def store(tmp_path: Path) -> Path:
    path = tmp_path / "store"
    with open_store(path) as opened:
        layout = KVLayout.opaque(BLOCK_BYTES, 16, dtype="fp8_e4m3")
        space = opened.namespace(model="some/model", layout=layout, tenant="acme", secret=SECRET)
        keys = space.keys(list(range(16 * BLOCKS)))
        for number, key in enumerate(keys):
            assert opened.put_many([key], [bytes([number]) * BLOCK_BYTES], timeout_s=10.0)[0]
        assert opened.flush()
        opened.remove(keys[-2:])
    return path


def damage(path: Path, slots: int = 1) -> None:
    """Hit the payload of one record in each of some segments; page 6 is one in all of them."""
    for file in sorted(path.glob("segment-*"))[:slots]:
        with file.open("r+b") as opened:
            opened.seek(6 * 4096 + 77)
            opened.write(b"\xff\x00\xff")


def test_a_sound_store(store: Path, capsys: Seen) -> None:
    assert main(["check", str(store)]) == 0
    assert f"{store}: ok, {BLOCKS - 2} intact blocks" in capsys.readouterr().out
    assert main(["check", "--json", str(store)]) == 0
    seen = json.loads(capsys.readouterr().out)
    assert (seen["ok"], seen["blocks"], seen["findings"]) == (True, BLOCKS - 2, [])
    assert seen["bytes"] == (BLOCKS - 2) * BLOCK_BYTES
    assert seen["held_bytes"] == sum(f.stat().st_size for f in store.glob("segment-*"))


def test_damage_is_named_and_nothing_is_changed(store: Path, capsys: Seen) -> None:
    damage(store)
    before = {file: file.read_bytes() for file in store.iterdir()}
    assert main(["check", str(store)]) == 1
    seen = capsys.readouterr()
    assert "slot 0, page " in seen.out
    assert "does not match its checksum" in seen.out
    assert f"hint: kvdepot check --repair {store}" in seen.err
    assert main(["check", "--json", str(store)]) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["ok"]
    assert [set(finding) for finding in found["findings"]] == [{"where", "what"}]
    assert before == {file: file.read_bytes() for file in store.iterdir()}


def test_repair(store: Path, capsys: Seen) -> None:
    damage(store)
    assert main(["check", "--repair", str(store)]) == 0
    seen = capsys.readouterr().out
    assert seen.index("found") < seen.index("repaired") < seen.index(": ok")
    assert "1 damaged records dropped" in seen
    assert main(["check", str(store)]) == 0
    assert main(["check", "--repair", str(store)]) == 0


def test_json_of_a_repair(store: Path, capsys: Seen) -> None:
    damage(store)
    (store / "superblock").unlink()
    assert main(["check", "--repair", "--json", str(store)]) == 0
    seen = json.loads(capsys.readouterr().out)
    assert seen["ok"] and seen["findings"] == []
    assert seen["blocks"] == BLOCKS - 3
    assert {finding["where"] for finding in seen["repair"]["done"]} == {"superblock", "slot 0"}
    assert seen["repair"]["dropped"] == 1
    assert "missing" in str(seen["repair"]["found"])


def test_people_are_spared_long_lists(tmp_path: Path, capsys: Seen) -> None:
    path = tmp_path / "many"
    with open_store(path) as opened:
        space = opened.namespace(model="m", layout=KVLayout.opaque(BLOCK_BYTES, 16))
        for key in space.keys(list(range(16 * 230))):
            assert opened.put_many([key], [key * 128], timeout_s=10.0)[0]
    count = len(list(path.glob("segment-*")))
    assert count > SHOWN_MAX
    damage(path, count)
    assert main(["check", str(path)]) == 1
    assert "more; --json lists them all" in capsys.readouterr().out


def test_repair_waits_for_no_writer(store: Path, capsys: Seen) -> None:
    damage(store)
    with open_store(store):
        assert main(["check", "--repair", str(store)]) == 2
    seen = capsys.readouterr().err
    assert "is open for writing by process" in seen
    assert "hint: " in seen


@pytest.mark.parametrize("command", [["check"], ["check", "--repair"], ["inspect"]])
def test_no_store(command: list[str], tmp_path: Path, capsys: Seen) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    empty = tmp_path / "empty"
    empty.mkdir()
    for path, told in (
        (tmp_path / "nowhere", "does not exist"),
        (file, "is a file"),
        (empty, "no store"),
    ):
        assert main([*command, str(path)]) == 2
        seen = capsys.readouterr()
        assert seen.out == ""
        assert seen.err.startswith(f"error: {path}: ") and told in seen.err
        assert "\nhint: " in seen.err
    assert list(empty.iterdir()) == []
    assert not (tmp_path / "nowhere").exists()


def test_inspect(store: Path, capsys: Seen) -> None:
    assert main(["inspect", str(store)]) == 0
    seen = capsys.readouterr().out
    for text in ("format 2", "some/model", "acme", "fp8_e4m3", "sealed", "open", "tombstones  2"):
        assert text in seen
    assert SECRET.decode() not in seen
    assert main(["inspect", "--json", str(store)]) == 0
    text = capsys.readouterr().out
    assert SECRET.decode() not in text and SECRET.hex() not in text
    found = json.loads(text)
    assert (found["format"], found["segment_bytes"], found["blocks"]) == (2, 65536, BLOCKS - 2)
    assert (found["tombstones"], found["damage"]) == (2, [])
    (space,) = found["namespaces"]
    assert (space["blocks"], space["nbytes"]) == (BLOCKS - 2, (BLOCKS - 2) * BLOCK_BYTES)
    assert (space["model"], space["tenant"], space["block_tokens"]) == ("some/model", "acme", 16)
    assert sum(segment["live_blocks"] for segment in found["segments"]) == BLOCKS - 2
    # A space and a removal are records, too, and removed blocks still are.
    assert sum(segment["records"] for segment in found["segments"]) == BLOCKS
    assert 0 < found["oldest_stamp"] <= found["newest_stamp"]
    assert [s["sealed"] for s in found["segments"]].count(False) == 1


def test_inspect_tells_of_damage(store: Path, capsys: Seen) -> None:
    (store / "superblock").write_bytes(b"\1" * 4096)
    assert main(["inspect", str(store)]) == 0
    seen = capsys.readouterr()
    assert "some/model" in seen.out
    assert "superblock: damaged" in seen.err
