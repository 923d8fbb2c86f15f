"""Torture of nodes and clients finds what is broken on purpose."""

import os
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvdepot.core.depot import FlushReport
from kvdepot.store.drives.watchdog import VolumeWatchdog
from kvdepot.store.shared_metadata import SharedMetadata
from kvdepot.store.store import Store
from kvdepot.testing.daemons import DaemonProcess
from kvdepot.testing.torture import clients, nodes
from kvdepot.testing.torture.rounds import play
from kvdepot.testing.torture.shared_bucket import BucketLink, FolderObjects, ForeignFiles
from kvdepot.testing.torture.workload import ALLOWANCE_S
from kvdepot.testing.torture.world import Block, keys_of
from kvdepot.volumes.object.bucket import BucketError
from kvdepot.volumes.object.volume import BucketVolume

pytestmark = [pytest.mark.crash, pytest.mark.slow]

ROUNDS_MAX = 12


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The faults stay: there is nothing to wait for."""
    monkeypatch.setattr(nodes, "AGREE_S", 1.0 - ALLOWANCE_S)


def keep_removals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VolumeWatchdog, "_delete", lambda *_: 0)


def forget_what_is_owed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SharedMetadata, "catch_up", lambda *_: None)


def upload_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise BucketError("nothing is uploaded")

    monkeypatch.setattr(BucketVolume, "_upload", refuse)
    monkeypatch.setattr(Store, "flush", lambda *_, **__: FlushReport(True))


def delete_others(monkeypatch: pytest.MonkeyPatch) -> None:
    delete, root = BucketLink.delete, "data/customers/2026.parquet"

    def more(link: BucketLink, paths: Sequence[str]) -> None:
        delete(link, [*paths, root])

    monkeypatch.setattr(BucketLink, "delete", more)


def give_other_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Store.get_many

    def wrong(store: Any, keys: Sequence[Any], intos: Sequence[Any], **named: Any) -> Any:
        answers = right(store, keys, intos, **named)
        for into in intos:
            into[0] ^= 1
        return answers

    monkeypatch.setattr(Store, "get_many", wrong)


def leak(monkeypatch: pytest.MonkeyPatch) -> None:
    close = BucketVolume.close

    def and_leak(volume: BucketVolume) -> None:
        close(volume)
        os.dup(0)

    monkeypatch.setattr(BucketVolume, "close", and_leak)


@pytest.mark.parametrize(
    ("sabotage", "fault"),
    [
        (keep_removals, "back"),
        (forget_what_is_owed, "back"),
        (upload_nothing, "lost"),
        (delete_others, "foreign"),
        (give_other_bytes, "wrong"),
        (leak, "leaked"),
    ],
    ids=lambda one: getattr(one, "__name__", one),
)
def test_a_broken_promise_of_nodes_is_seen(
    sabotage: Callable[[pytest.MonkeyPatch], None],
    fault: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sabotage(monkeypatch)
    assert fault in found(tmp_path, "nodes", fault)


def see_other_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Block, "payload", property(lambda block: bytes(block.nbytes)))
    monkeypatch.setattr(clients.ClientCalls, "_put", put_ones)


def put_ones(calls: Any) -> None:
    blocks = calls._calls.prompt()
    payloads = [b"\1" * block.nbytes for block in blocks]
    calls.store.put_many(keys_of(blocks), payloads, timeout_s=1.0)


def hold_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon does not release what an ended client has leased."""
    monkeypatch.setattr(clients, "ALLOWANCE_S", 1.0)
    code = (
        "import sys; from kvdepot.daemon.server.client_resources import BlockLease; "
        "BlockLease.release = lambda lease: None; from kvdepot.__main__ import run; "
        "sys.argv[0] = 'kvdepot'; run()"
    )

    def start(arguments: Sequence[str], log: Any) -> Any:
        command = [sys.executable, "-c", code, *arguments]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)

    monkeypatch.setattr(DaemonProcess, "run", staticmethod(start))


@pytest.mark.parametrize(
    ("sabotage", "fault"), [(see_other_bytes, "wrong"), (hold_for_ever, "leaked")]
)
def test_a_broken_promise_to_clients_is_seen(
    sabotage: Callable[[pytest.MonkeyPatch], None],
    fault: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sabotage(monkeypatch)
    assert fault in found(tmp_path, "clients", fault)


def found(folder: Path, kind: Any, fault: str) -> set[str]:
    """Faults of some rounds, until there is the one."""
    seen: set[str] = set()
    for seed in range(ROUNDS_MAX):
        seen |= set(play(folder, seed, kind).faults)
        if fault in seen:
            break
    return seen


def test_a_changed_file_of_another_program_is_named(tmp_path: Path) -> None:
    files = ForeignFiles()
    files.add(tmp_path, ["data/one", "data/two", "three"])
    assert files.touched() == []
    (tmp_path / "data/one").write_text("other")
    (tmp_path / "three").unlink()
    assert [text.split()[0] for text in files.touched()] == [
        str(tmp_path / "data/one"), str(tmp_path / "three"),
    ]  # fmt: skip


def test_a_link_fails_as_it_is_told(tmp_path: Path) -> None:
    bucket = FolderObjects(tmp_path / "bucket")
    link = BucketLink(bucket, random.Random(1))
    link.create("a/b", b"xyz")
    assert [one.path for one in link.list_all("a/")] == ["a/b"]
    assert link.folders("") == ["a"] and bytes(link.get_range("a/b", 1, 3)) == b"yz"
    link.become("away")
    with pytest.raises(BucketError):
        link.get("a/b")
    link.become("fails some")
    outcomes = []
    for number in range(60):
        try:
            link.create(f"c/{number}", b"")
            outcomes.append("done")
        except BucketError:
            there = any(one.path == f"c/{number}" for one in bucket.list_all("c/"))
            outcomes.append("carried out" if there else "failed")
    assert set(outcomes) == {"done", "carried out", "failed"}
    link.become("cut")
    link.become("up")
    with pytest.raises(BucketError):
        link.get("a/b")
