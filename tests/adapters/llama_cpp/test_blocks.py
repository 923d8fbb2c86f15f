"""Sequences in a depot: shared prefixes once, the longest known prefix back, or less of it."""

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.llama_states import MadeState

import kvdepot
from kvdepot.adapters.llama_cpp import blocks as blocks_module
from kvdepot.adapters.llama_cpp.blocks import SequenceBlocks, gguf_digest, gguf_files
from kvdepot.adapters.llama_cpp.sequence_state import Plane, StateLayout, read_state
from kvdepot.config.settings import AuditConfig
from kvdepot.depot import Depot
from kvdepot.errors import ModelError

SIZE = 8


def open_blocks(depot: Depot, made: MadeState, **more: Any) -> SequenceBlocks:
    layout = read_state(made.state(), made.version).layout
    return SequenceBlocks(depot, layout, block_tokens=SIZE, model="m", fingerprint="f", **more)


def load(blocks: SequenceBlocks, tokens: list[int]) -> tuple[int, bytes]:
    held = [bytearray()]

    def make(_: int, nbytes: int) -> bytearray:
        held.append(bytearray(nbytes))
        return held[-1]

    return blocks.load(tokens, 1, make), bytes(held[-1])


@pytest.fixture
def depot() -> Depot:
    return kvdepot.open(dram={"capacity": "8MiB", "prefault": False, "huge_pages": "never"})


@pytest.mark.parametrize("transposed", [False, True])
def test_the_longest_known_prefix_comes_back(depot: Depot, transposed: bool) -> None:
    made = MadeState(cells=20, transposed=transposed)
    with depot:
        blocks = open_blocks(depot, made)
        tokens = list(range(20))
        assert blocks.store(tokens, read_state(made.state(), 4)) == 2
        assert blocks.known(tokens) == 16
        cells, content = load(blocks, [*tokens[:17], 999, 998])
        assert cells == 16
        assert content == MadeState(cells=16, transposed=transposed).state()
        assert load(blocks, [7, *tokens])[0] == 0


def test_a_shared_prefix_is_stored_once(depot: Depot) -> None:
    made = MadeState(cells=24)
    with depot:
        blocks = open_blocks(depot, made)
        state = read_state(made.state(), 4)
        assert blocks.store([*range(16), *[100] * 8], state) == 3
        assert blocks.store([*range(16), *[200] * 8], state) == 1
        assert depot.stats()["blocks"] == 4


def test_a_part_of_a_sequence_is_stored_behind_what_is_known(depot: Depot) -> None:
    whole, rest = MadeState(cells=24), MadeState(cells=12, first=12)
    with depot:
        blocks = open_blocks(depot, whole)
        tokens = list(range(24))
        first = MadeState(cells=12)
        assert blocks.store(tokens, read_state(first.state(), 4)) == 1
        # The second block lies in neither part as a whole.
        assert blocks.store(tokens, read_state(rest.state(), 4)) == 1
        assert blocks.known(tokens) == 8


def test_different_models_share_nothing(depot: Depot) -> None:
    made = MadeState(cells=16)
    with depot:
        open_blocks(depot, made).store(list(range(16)), read_state(made.state(), 4))
        assert open_blocks(depot, made, adapter="lora").known(list(range(16))) == 0
        assert open_blocks(depot, MadeState(version=2)).known(list(range(16))) == 0
        assert open_blocks(depot, made).known(list(range(16))) == 16


def test_another_layout_is_not_stored(depot: Depot) -> None:
    with depot:
        blocks = open_blocks(depot, MadeState())
        with pytest.raises(ModelError, match="layout"):
            blocks.store(list(range(40)), read_state(MadeState(transposed=True).state(), 4))


def test_a_block_that_is_damaged_costs_the_rest(tmp_path: Path) -> None:
    made = MadeState(cells=32, k_row=4096)
    settings: dict[str, Any] = {
        "dram": {"capacity": "8MiB", "prefault": False, "huge_pages": "never"},
        "ssd": {"path": tmp_path / "ssd", "capacity": "8MiB", "segment": "1MiB"},
    }
    tokens = list(range(32))
    with kvdepot.open(**settings) as depot:
        open_blocks(depot, made).store(tokens, read_state(made.state(), 4))
    third = made.payload(16, 24)
    for path in (tmp_path / "ssd").rglob("segment-*"):
        content = path.read_bytes()
        at = content.find(third[:512])
        if at >= 0:
            path.write_bytes(content[:at] + bytes(512) + content[at + 512 :])
            break
    else:
        pytest.fail("the block is not on disk")
    with kvdepot.open(**settings) as depot:
        cells, content = load(open_blocks(depot, made), tokens)
    assert cells == 16
    assert content == MadeState(cells=16, k_row=4096).state()


def test_all_parts_of_a_split_model_count(tmp_path: Path) -> None:
    parts = [tmp_path / f"m-0000{at}-of-00002.gguf" for at in (1, 2)]
    parts[0].write_bytes(b"one")
    with pytest.raises(ModelError, match="00002-of"):
        gguf_digest(parts[0], None, None)
    parts[1].write_bytes(b"two")
    before = gguf_digest(parts[0], None, None)
    parts[1].write_bytes(b"six")
    assert gguf_digest(parts[0], None, None) != before
    assert gguf_files(tmp_path / "m.gguf") == [tmp_path / "m.gguf"]
    assert gguf_files(parts[0]) == parts


def test_blocks_are_stored_with_their_token_ids() -> None:
    made = MadeState(cells=20)
    with kvdepot.open(dram={"capacity": "8MiB", "prefault": False, "huge_pages": "never"}) as store:
        blocks = open_blocks(store, made)
        tokens = list(range(40, 60))
        assert blocks.store(tokens, read_state(made.state(), 4)) == 2
        assert store.routing.token_ids(blocks.space.keys(tokens)) == [tokens[:8], tokens[8:16]]


class NumberState(MadeState):
    """K in q8_0 and V in f16, of numbers."""

    def rows(self, kind: str, layer: int, size: int) -> dict[int, bytes]:
        found = {}
        for position, raw in super().rows(kind, layer, size).items():
            if kind == "k":
                found[position] = struct.pack("<e", 0.5) + raw[2:]
            else:
                found[position] = np.frombuffer(raw, np.int16).astype(np.float16).tobytes()
        return found


class TestAudit:
    def opened(self, depot: Depot, made: MadeState) -> SequenceBlocks:
        return open_blocks(depot, made, audit=AuditConfig(share=0.02))

    def halves(self, seed: int = 1) -> MadeState:
        return NumberState(cells=24, k_row=34, v_row=64, seed=seed)

    def test_an_audited_hit_is_a_block_short_and_is_compared(self, depot: Depot) -> None:
        made, tokens = self.halves(), list(range(24))
        with depot:
            blocks = self.opened(depot, made)
            blocks.store(tokens, read_state(made.state(), 4))
            assert load(blocks, tokens)[0] == 16
            assert blocks.known(tokens) == 16, "so that a request without new blocks is saved"
            assert blocks.store(tokens, read_state(made.state(), 4)) == 0
            known = depot.audits.list()
            assert (known["compared"], known["mismatched"]) == (1, 0)
            assert blocks.known(tokens) == 24
            assert load(blocks, tokens)[0] == 24, "one in fifty"

    def test_other_numbers_end_all_hits(self, depot: Depot) -> None:
        made, tokens = self.halves(), list(range(24))
        with depot:
            blocks = self.opened(depot, made)
            blocks.store(tokens, read_state(made.state(), 4))
            load(blocks, tokens)
            blocks.store(tokens, read_state(self.halves(seed=2).state(), 4))
            (found,) = depot.audits.list()["quarantined"]
            assert "llama.cpp" in found["found_by"]
            assert load(blocks, tokens)[0] == 0

    def test_not_beside_other_requests(self, depot: Depot) -> None:
        made, tokens = self.halves(), list(range(24))
        with depot:
            blocks = self.opened(depot, made)
            blocks.store(tokens, read_state(made.state(), 4))
            assert blocks.load(tokens, 1, lambda _, nbytes: bytearray(nbytes), busy=True) == 24


@pytest.mark.parametrize(
    ("kind", "raw", "expected"),
    [
        (0, np.array([1.5, -2], np.float32), [1.5, -2]),
        (1, np.array([1.5, -2], np.float16), [1.5, -2]),
        (30, np.array([0x3FC0, 0xC000], np.uint16), [1.5, -2]),
        (8, np.frombuffer(struct.pack("<e32b", 0.5, *range(-16, 16)), np.uint8), None),
        (2, np.frombuffer(struct.pack("<e16B", 0.5, *[0x1F] * 16), np.uint8), None),
    ],
)
def test_numbers_of_each_type(kind: int, raw: Any, expected: list[float] | None) -> None:
    if kind == 8:
        expected = [number / 2 for number in range(-16, 16)]
    if kind == 2:
        expected = [3.5] * 16 + [-3.5] * 16
    raw = raw.view(np.uint8)
    layout = StateLayout(4, False, (), (Plane(kind, len(raw)),), ())
    assert layout.numbers(raw, 1).tolist() == expected


def test_a_type_that_is_not_understood() -> None:
    layout = StateLayout(4, False, (), (Plane(99, 4),), ())
    with pytest.raises(ValueError, match="99"):
        layout.numbers(bytes(4), 1)


def test_users_have_namespaces_of_their_own(depot: Depot) -> None:
    """Their token ids, which the depot announces to routers, are not kept."""
    made = MadeState(cells=16)
    tokens = list(range(16))
    state = read_state(made.state(), 4)
    with depot:
        assert isinstance(depot, kvdepot.Store)
        shared = open_blocks(depot, made)
        one, other = (shared.variant(user, "") for user in (b"one", b"other"))
        for blocks in (shared, one, other):
            assert blocks.known(tokens) == 0
            assert blocks.store(tokens, state) == 2
            assert load(blocks, tokens) == (16, made.state())
        assert shared.variant(b"one", "") is one
        assert shared.variant(b"", "") is shared
        assert len({blocks.space.tag for blocks in (shared, one, other)}) == 3
        assert shared.tags == [blocks.space.tag for blocks in (shared, one, other)]
        assert depot.routing.token_ids(shared.space.keys(tokens)) == [tokens[:8], tokens[8:]]
        assert depot.routing.token_ids(one.space.keys(tokens)) == [[], []]


def test_users_have_a_namespace_for_each_set_of_loras(depot: Depot) -> None:
    made = MadeState(cells=16)
    tokens = list(range(16))
    state = read_state(made.state(), 4)
    with depot:
        assert isinstance(depot, kvdepot.Store)
        off = open_blocks(depot, made, adapter="off")
        names = [(user, adapter) for user in (b"", b"one", b"other") for adapter in ("off", "on")]
        for user, adapter in names:
            blocks = off.variant(user, adapter)
            assert blocks.known(tokens) == 0, (user, adapter)
            assert blocks.store(tokens, state) == 2
            kept = [tokens[:8], tokens[8:]] if not user else [[], []]
            assert depot.routing.token_ids(blocks.space.keys(tokens)) == kept
        assert off.variant(b"", "off") is off
        assert off.tags == [off.variant(*name).space.tag for name in names]
        assert len(set(off.tags)) == len(names)


def test_a_users_namespace_depends_on_the_tenants_secret_too() -> None:
    made = MadeState(cells=16)
    tags = set()
    for secret in ("11" * 16, "22" * 16):
        dram = {"capacity": "8MiB", "prefault": False, "huge_pages": "never"}
        with kvdepot.open(dram=dram, tenants={"t": {"secret_hex": secret}}) as depot:
            tags.add(open_blocks(depot, made, tenant="t").variant(b"one", "").space.tag)
    assert len(tags) == 2


def test_users_that_were_forgotten_find_their_blocks(
    depot: Depot, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks_module, "_VARIANTS_MAX", 3)
    made = MadeState(cells=16)
    with depot:
        shared = open_blocks(depot, made)
        shared.variant(b"0", "").store(list(range(16)), read_state(made.state(), 4))
        for number in range(1, 9):
            shared.variant(b"%d" % number, "")
            assert len(shared.tags) <= 4
        assert shared.variant(b"0", "").known(list(range(16))) == 16
