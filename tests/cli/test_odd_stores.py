"""What lies in a store's superblock and metadata may be anything: commands answer, or say what is
wrong in one line.
"""

import json
import random
import struct
from pathlib import Path
from typing import Any

import pytest
from tests.support.small_store import prompt, put, settings, space_of

import kvdepot
from kvdepot.cli.main import main
from kvdepot.core.metadata import MetaEntry, MetaKind
from kvdepot.errors import KVDepotError
from kvdepot.format.metadata import MAGIC
from kvdepot.format.segment import FORMAT
from kvdepot.native import checksum
from kvdepot.testing.images import STAMPS

PAGE = 4096
ODD: list[Any] = [
    None, True, -1, 0, 1 << 70, 1e300, "", "x" * 40, [], {}, float("nan"), {"a": [1]},
    "\ud800\x1b[2J\n", "0-9999999999", "5-", "1-0", 4096, 1 << 63, (1 << 20) + 1,
]  # fmt: skip
TEXTS = [b"[]", b"null", b"1", b"{", b'"x"', b"[" * 3000, b"{}", b"\xff\xfe", b'{"a":1e999}', b""]

KINDS = [kind for kind in MetaKind if kind not in (MetaKind.FLOOR, MetaKind.TOMBSTONE)]
"""A floor or a tombstone that can be read would be right to cost blocks."""


def odd_superblock(random: random.Random) -> bytes:
    """A page with a right checksum, with any fields; sometimes no such page."""
    if random.random() < 0.2:
        return random.randbytes(random.choice([0, 10, PAGE, 2 * PAGE]))
    fields = [1 << 20, 0, 0]  # segment bytes, generation, settled
    fields[random.randrange(3)] = random.choice([0, 1, PAGE, (1 << 20) + 1, 1 << 40, (1 << 64) - 1])
    body = random.randbytes(16) + struct.pack("<QQQ", *fields)
    body = body[: random.choice([0, 1, 39, 40, 40, 40])]
    number, length = random.choice([FORMAT, FORMAT, 7]), random.choice([len(body), 0, 1 << 30])
    page = (MAGIC + struct.pack("<II", number, length) + body).ljust(PAGE - 8, b"\0")
    return struct.pack("<Q", checksum(page[: 16 + min(length, PAGE)])) + page


def odd_description(random: random.Random) -> bytes:
    one, other = random.choice(ODD), random.choice(ODD)
    layout = random.choice([other, {"dtype": one, "block_tokens": other}])
    whole = {"model": one, "tenant": other, "layout": layout}
    return random.choice([*TEXTS, json.dumps(whole).encode(), json.dumps(one).encode()])


def answers(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("inspect", "check"):
        for options in ([], ["--json"]):
            status = main([command, str(path), *options])
            said = capsys.readouterr()
            assert status in (0, 1) or said.err.startswith("error: "), said.err
            if options and status in (0, 1):
                json.loads(said.out)


def test_metadata(tmp_path: Path, seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    rng = random.Random(seed)
    with kvdepot.open(**settings(tmp_path / "store")) as store:
        assert all(put(store, prompt(space_of(store), 1, 3)))
        for _ in range(40):
            name, kind = rng.choice([b"", rng.randbytes(8), rng.randbytes(32)]), rng.choice(KINDS)
            entry = MetaEntry(kind, name, STAMPS.next(), odd_description(rng))
            assert store.inspect().log_volume().put_meta([entry])
    answers(tmp_path / "store", capsys)
    with kvdepot.open(**settings(tmp_path / "store")) as store:
        assert store.admin.check().ok


def test_superblocks(tmp_path: Path, seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    rng = random.Random(seed)
    with kvdepot.open(**settings(tmp_path / "store")) as store:
        keys = prompt(space_of(store), 1, 3)
        assert all(put(store, keys))
    for number in range(30):
        (tmp_path / "store" / "superblock").write_bytes(odd_superblock(rng))
        answers(tmp_path / "store", capsys)
        if number % 5 == 0:
            try:
                store = kvdepot.open(**settings(tmp_path / "store"))
            except KVDepotError:
                continue
            with store:
                space_of(store)
                assert len(store.match(keys)) == 3, "the metadata names the volume"
