"""What is there after a restart, and what must not be: removals, sizes, paths, tenants, readers."""

import errno
import hashlib
import threading
from pathlib import Path
from typing import Any, ClassVar

import pytest
from tests.support.small_store import (
    BLOCK,
    IN_DRAM,
    LAYOUT,
    files_bytes,
    flood,
    prompt,
    put,
    settings,
    space_of,
    tiers,
)
from tests.support.waiting import eventually

import kvdepot
from kvdepot.config.settings import load
from kvdepot.memory.memory import Memory
from kvdepot.store.open import assemble, open_store
from kvdepot.testing.faults import Call, Fail, Fault, FaultyFiles, Stall


def fingerprints(folder: Path) -> dict[str, str]:
    """Every file of a store by its content."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.iterdir())
    }


class TestRemoval:
    def test_a_leased_block_vanishes_from_lookups_and_stays_for_its_lease(
        self, tmp_path: Path
    ) -> None:
        with kvdepot.open(**settings(tmp_path / "kv")) as store:
            space = space_of(store)
            keys = prompt(space, 1, 3)
            put(store, keys)
            store.flush()
            with store.lease(keys) as lease:
                assert store.remove(keys) == 3
                assert len(store.match(keys)) == 0
                assert tiers(store, keys) == [None] * 3
                flood(store, space, 2 * IN_DRAM)
                view = lease.view(1)
                assert view is not None
                assert view == bytes(put_payload(keys[1])), "its memory is not reused"
                view.release()
                assert put(store, keys) == [kvdepot.PutResult.STORED] * 3
            assert tiers(store, keys) == ["dram"] * 3, "the new ones are not the removed ones"
            assert store.flush()
            assert store.stats()["leased"] == 0
            assert store.admin.check()
        with kvdepot.open(**settings(tmp_path / "kv")) as store:
            space_of(store)
            assert tiers(store, keys) == ["ssd"] * 3

    @pytest.mark.parametrize("everything", [False, True])
    def test_a_block_removed_while_it_is_being_written_does_not_come_back(
        self, tmp_path: Path, everything: bool
    ) -> None:
        files = FaultyFiles()
        with assemble(load(overrides=settings(tmp_path / "kv")), files=files) as store:
            space = space_of(store)
            keys = prompt(space, 1, 6)
            files.add(Fault(Call.RUN_WRITE, Stall(), times=None))
            put(store, keys)
            assert eventually(lambda: files.counts[Call.RUN_WRITE] > 1), "the writer has begun"
            removed: list[int] = []

            def remove() -> None:
                removed.append(store.remove(namespace=space) if everything else store.remove(keys))

            remover = threading.Thread(target=remove)
            remover.start()
            assert eventually(lambda: not len(store.match(keys)))
            files.clear()
            remover.join()
            assert removed == [6]
        with kvdepot.open(**settings(tmp_path / "kv")) as store:
            space_of(store)
            assert tiers(store, keys) == [None] * 6
            assert store.stats()["blocks"] == 0
            assert store.admin.check()

    def test_a_namespace_is_removed_for_good_and_others_are_not(self, tmp_path: Path) -> None:
        with kvdepot.open(**settings(tmp_path / "kv")) as store:
            gone, stays = space_of(store, "gone"), space_of(store, "stays")
            old, other = prompt(gone, 1, 30), prompt(stays, 1, 30)
            put(store, old)
            put(store, other)
            store.flush()
            assert store.remove(namespace=gone) == 30
            assert store.remove(namespace=gone) == 0
            assert len(store.match(old)) == 0
            assert len(store.match(other)) == 30
            new = prompt(gone, 2, 5)
            put(store, new)
            put(store, old[:2])
        for _ in range(2):
            with kvdepot.open(**settings(tmp_path / "kv")) as store:
                space_of(store, "gone")
                space_of(store, "stays")
                assert len(store.match(old)) == 2
                assert tiers(store, new) == ["ssd"] * 5
                assert tiers(store, other) == ["ssd"] * 30
                assert store.admin.check()


def put_payload(key: kvdepot.BlockKey) -> bytes:
    return hashlib.shake_128(key).digest(BLOCK)


class TestSizesAndPaths:
    def test_a_smaller_capacity_is_kept_to_and_keeps_the_newest(self, tmp_path: Path) -> None:
        with kvdepot.open(**settings(tmp_path / "kv", capacity="16MiB")) as store:
            space = space_of(store)
            for number in range(60):
                put(store, prompt(space, number, 10))
            assert store.flush()
            assert files_bytes(tmp_path / "kv") > 8 << 20
        with kvdepot.open(**settings(tmp_path / "kv", capacity="6MiB")) as store:
            space = space_of(store)
            assert files_bytes(tmp_path / "kv") <= 6 << 20
            assert store.stats()["tiers"]["ssd"]["held_bytes"] <= 6 << 20
            assert tiers(store, prompt(space, 59, 10)) == ["ssd"] * 10
            assert tiers(store, prompt(space, 0, 10)) == [None] * 10
            assert store.admin.check()
            flood(store, space, 1000)
            assert store.flush()
            assert files_bytes(tmp_path / "kv") <= 6 << 20
            assert store.admin.check()

    def test_a_larger_capacity_is_used(self, tmp_path: Path) -> None:
        with kvdepot.open(**settings(tmp_path / "kv", capacity="4MiB")) as store:
            flood(store, space_of(store), 400)
            assert store.flush()
            before = store.stats()["tiers"]["ssd"]["blocks"]
        with kvdepot.open(**settings(tmp_path / "kv", capacity="16MiB")) as store:
            flood(store, space_of(store), 700, first=5000)
            assert store.flush()
            assert store.stats()["tiers"]["ssd"]["blocks"] > 2 * before
            assert store.admin.check()

    def test_two_paths_share_the_blocks(self, tmp_path: Path) -> None:
        paths = [tmp_path / "a", tmp_path / "b"]
        with kvdepot.open(**settings(paths, capacity="32MiB")) as store:
            keys = [key for n in range(60) for key in prompt(space_of(store), n, 10)]
            for start in range(0, 600, 10):
                assert all(put(store, keys[start : start + 10]))
            assert store.flush()
            drives = store.stats()["tiers"]["ssd"]["drives"]
            assert [drive["path"] for drive in drives] == list(map(str, paths))
        assert min(files_bytes(path) for path in paths) > 1 << 20, "both are used"
        with kvdepot.open(**settings(paths, capacity="32MiB")) as store:
            space_of(store)
            assert tiers(store, keys) == ["ssd"] * 600
            assert store.remove(keys) == 600
        with kvdepot.open(**settings(paths, capacity="32MiB")) as store:
            space_of(store)
            assert tiers(store, keys) == [None] * 600

    def test_a_toml_file_is_a_configuration(self, tmp_path: Path) -> None:
        config = tmp_path / "kvdepot.toml"
        config.write_text(
            f"""
            [dram]
            capacity = "4MiB"
            [ssd]
            path = "{tmp_path / "kv"}"
            capacity = "16MiB"
            read_timeout = "1500ms"
            [tenants.acme]
            secret_hex = "00ff"
            """
        )
        with kvdepot.open(config) as store:
            keys = prompt(space_of(store), 1, 3)
            assert all(put(store, keys))
            assert store.stats()["tiers"]["dram"]["capacity_bytes"] == 4 << 20
        with open_store(str(config), dram="8MiB") as store:
            space_of(store)
            assert store.stats()["tiers"]["dram"]["capacity_bytes"] == 8 << 20
            assert tiers(store, keys) == ["ssd"] * 3


class TestTenants:
    SECRETS: ClassVar[dict[str, Any]] = {"a": {"secret_hex": "aa"}, "b": {"secret_hex": "bb"}}

    def test_tenants_with_secrets_do_not_see_each_others_blocks(self, tmp_path: Path) -> None:
        tokens = range(16 * 4)
        with kvdepot.open(**settings(tmp_path / "kv"), tenants=self.SECRETS) as store:
            mine = store.namespace(model="m", layout=LAYOUT, tenant="a").keys(tokens)
            yours = store.namespace(model="m", layout=LAYOUT, tenant="b").keys(tokens)
            nobodys = store.namespace(model="m", layout=LAYOUT).keys(tokens)
            assert len({*mine, *yours, *nobodys}) == 12
            put(store, mine)
            assert len(store.match(yours)) == len(store.match(nobodys)) == 0
            assert tiers(store, yours + nobodys) == [None] * 8
        with kvdepot.open(**settings(tmp_path / "kv")) as store:
            guessed = store.namespace(model="m", layout=LAYOUT, tenant="a").keys(tokens)
            assert len(store.match(guessed)) == 0, "the name without the secret is not enough"
            known = store.namespace(model="m", layout=LAYOUT, tenant="a", secret=b"\xaa")
            assert known.keys(tokens) == mine
            assert tiers(store, mine) == ["ssd"] * 4

    def test_the_secret_is_not_written_down(self, tmp_path: Path) -> None:
        secret = "5ec2e7" * 5
        with kvdepot.open(
            **settings(tmp_path / "kv"), tenants={"a": {"secret_hex": secret}}
        ) as store:
            put(store, store.namespace(model="m", layout=LAYOUT, tenant="a").keys(range(64)))
        for path in (tmp_path / "kv").iterdir():
            content = path.read_bytes()
            assert bytes.fromhex(secret) not in content
            assert secret.encode() not in content


class TestReadOnly:
    def test_a_reader_beside_the_writer_sees_what_was_flushed(self, tmp_path: Path) -> None:
        with kvdepot.open(**settings(tmp_path / "kv")) as writer:
            keys = prompt(space_of(writer), 1, 20)
            put(writer, keys)
            assert writer.flush()
            with kvdepot.open(**settings(tmp_path / "kv"), mode="r") as reader:
                space_of(reader)
                assert tiers(reader, keys) == ["ssd"] * 20
                assert tiers(reader, keys) == ["dram"] * 20
            assert put(writer, prompt(space_of(writer), 2, 5)) == [kvdepot.PutResult.STORED] * 5
            assert writer.flush()

    def test_a_reader_changes_nothing_on_disk(self, tmp_path: Path) -> None:
        with kvdepot.open(**settings(tmp_path / "kv")) as store:
            keys = prompt(space_of(store), 1, 20)
            put(store, keys)
        before = fingerprints(tmp_path / "kv")
        with kvdepot.open(**settings(tmp_path / "kv"), mode="r") as reader:
            space = space_of(reader)
            new = prompt(space, 2, 5)
            assert put(reader, new) == [kvdepot.PutResult.STORED] * 5
            assert tiers(reader, new) == ["dram"] * 5
            reader.remove(keys[3])
            assert len(reader.match(keys)) == 3
            flood(reader, space, 2 * IN_DRAM)
            assert not reader.flush()
            assert reader.admin.check()
        assert fingerprints(tmp_path / "kv") == before


class TestDriveDown:
    """A disk that fails makes the store smaller, not useless."""

    def test_a_block_that_cannot_be_read_can_be_put_into_memory_again(self, tmp_path: Path) -> None:
        files = FaultyFiles()
        options = settings(tmp_path / "kv", retry_initial="30s", retry_max="30s")
        with assemble(load(overrides=options), files=files) as store:
            space = space_of(store)
            keys = prompt(space, 1, 8)
            put(store, keys)
            store.flush()
            flood(store, space, 2 * IN_DRAM)
            assert store.flush()
            files.add(Fault(Call.RUN_READ, Fail(errno.EIO), times=None))
            assert tiers(store, keys) == [None] * 8
            assert not store.stats()["tiers"]["ssd"]["healthy"]
            assert all(put(store, keys))
            assert tiers(store, keys) == ["dram"] * 8
            files.clear()

    def test_a_check_beside_a_write_finds_nothing(self, tmp_path: Path) -> None:
        """A batch fills one segment and goes on in the next, where the disk stalls."""
        files = FaultyFiles()
        options = settings(tmp_path / "kv")
        options["dram"]["capacity"] = "8MiB"
        with assemble(load(overrides=options), files=files) as store:
            keys = prompt(space_of(store), 1, 120)
            stall = files.add(Fault(Call.RUN_WRITE, Stall(), skip=55, times=None))
            put(store, keys)
            assert eventually(lambda: stall.hits > 0)
            report = store.admin.check(deep=False)
            files.clear()
            assert store.flush()
            assert report.findings == []


@pytest.mark.parametrize(
    ("dram", "staging", "touched"),
    [(False, False, []), (False, True, [4]), (True, False, [2, 4])],
)
def test_memory_that_is_touched_at_opening(
    monkeypatch: pytest.MonkeyPatch, dram: bool, staging: bool, touched: list[int]
) -> None:
    seen: list[int] = []
    monkeypatch.setattr(Memory, "prefault", lambda self, then: seen.append(self.nbytes >> 20))
    memory = {"capacity": "2MiB", "huge_pages": "never", "prefault": dram}
    with kvdepot.open(dram=memory, writeback={"staging": "4MiB", "prefault": staging}):
        assert sorted(seen) == touched
