"""Pages of a host pool in a depot, and the settings. With a pool of our own; without SGLang."""

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.support.small_store import settings

import kvdepot
from kvdepot.adapters.sglang.config import read
from kvdepot.adapters.sglang.identity import identify
from kvdepot.adapters.sglang.pages import HostPages
from kvdepot.config.settings import AuditConfig
from kvdepot.errors import ConfigError

PAGE, LAYERS, WIDTH, PAGES = 4, 3, 32, 12
HASHES = [f"{number:064x}" for number in range(PAGES)]


class LayerFirstPool:
    """K and V of each layer apart, as SGLang's layer_first has them."""

    page_size, layout, dtype, layer_num = PAGE, "layer_first", torch.float16, LAYERS

    def __init__(self, seed: int) -> None:
        chance = torch.Generator().manual_seed(seed)
        shape = (2, LAYERS, PAGES * PAGE, WIDTH)
        self.buffer = torch.randint(0, 999, shape, generator=chance).to(self.dtype)

    def get_page_buffer_meta(self, indices: Any) -> tuple[list[int], list[int]]:
        found = [
            self.buffer[part, layer, at].data_ptr()
            for at in indices[::PAGE].tolist()
            for layer in range(LAYERS)
            for part in range(2)
        ]
        return found, [PAGE * WIDTH * 2] * len(found)

    def get_dummy_flat_data_page(self) -> Any:
        return torch.zeros(2 * LAYERS * PAGE * WIDTH, dtype=self.dtype)

    def get_data_page(self, at: int, flat: bool = True) -> Any:
        return self.buffer[:, :, at : at + PAGE].flatten()

    def set_from_flat_data_page(self, at: int, page: Any) -> None:
        self.buffer[:, :, at : at + PAGE] = page.reshape(2, LAYERS, PAGE, WIDTH)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[kvdepot.Depot]:
    with kvdepot.open(**settings(tmp_path / "depot")) as opened:
        yield opened


def pages_of(store: kvdepot.Depot, pool: Any, *, pieces: bool) -> HostPages:
    made = HostPages(store, pool, pieces=pieces)
    made.register({"model": "m", "extra": tuple(made.identity().items())})
    return made


def indices(numbers: list[int]) -> Any:
    return torch.tensor([at * PAGE + token for at in numbers for token in range(PAGE)])


@pytest.mark.parametrize("pieces", [True, False])
def test_a_round_trip(store: kvdepot.Depot, pieces: bool) -> None:
    source, target = LayerFirstPool(1), LayerFirstPool(2)
    pages = pages_of(store, source, pieces=pieces)
    assert pages.pieces is pieces
    keys = pages.keys(HASHES[:5], None, chained=True)
    assert pages.store(keys, indices([7, 1, 3, 0, 9])) == [True] * 5
    assert pages.store(keys, indices([7, 1, 3, 0, 9])) == [True] * 5
    other = pages_of(store, target, pieces=pieces)
    missing = other.keys([*HASHES[:5], HASHES[9]], None, chained=True)
    assert other.load(missing, indices([2, 4, 6, 8, 10, 11]), 5.0) == [True] * 5 + [False]
    for there, here in zip([7, 1, 3, 0, 9], [2, 4, 6, 8, 10], strict=True):
        wanted = source.get_data_page(there * PAGE)
        assert torch.equal(target.get_data_page(here * PAGE), wanted)


def test_flat_and_gathered_pages_are_kept_apart(store: kvdepot.Depot) -> None:
    pool = LayerFirstPool(1)
    flat, gathered = (pages_of(store, pool, pieces=pieces) for pieces in (False, True))
    assert flat.space.tag != gathered.space.tag


def test_a_pool_without_pieces_is_read_flat(store: kvdepot.Depot) -> None:
    class FlatPool(LayerFirstPool):
        def get_page_buffer_meta(self, indices: Any) -> tuple[list[int], list[int]]:
            raise ValueError("Unsupported layout")

    assert not pages_of(store, FlatPool(1), pieces=True).pieces


def test_chained_keys_continue_after_a_batch(store: kvdepot.Depot) -> None:
    pages = pages_of(store, LayerFirstPool(1), pieces=True)
    whole = pages.keys(HASHES, None, chained=True)
    assert whole[4:] == pages.keys(HASHES[4:], HASHES[3], chained=True)
    assert whole[4] != pages.keys(HASHES[4:], None, chained=False)[0]


@pytest.mark.parametrize(
    ("extra", "name"),
    [
        ({"dramm": "1GiB"}, "dramm"),
        ({"load_timeout": "0s"}, "load_timeout"),
        ({"tenant": "a"}, "tenant"),
        ({"prefix_chain": True}, "prefix_chain"),
        ({"decide": True}, "decide"),
    ],
)
def test_errors_name_the_setting(extra: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read({"backend_name": "kvdepot", **extra})
    assert str(caught.value).startswith(f"hicache-storage-backend-extra-config.{name}: ")


def test_several_processes_need_a_daemon() -> None:
    with pytest.raises(ConfigError, match="socket"):
        read({}).open(2)


def identity(arguments: Any = None, **more: Any) -> str:
    sizes = ("pp", "attn_cp", "dcp")
    ranks = {f"{name}_{part}": int(part == "size") for name in sizes for part in ("rank", "size")}
    facts = {"tp_rank": 0, "tp_size": 2, "is_mla_model": False, "tp_lcm_size": None, **ranks}
    settings = read({key: more.pop(key) for key in ("revision", "adapters") if key in more})
    storage = SimpleNamespace(**{"model_name": "m", **facts, **more})
    found = identify(storage, arguments, settings, "0.5")
    return str(found.namespace(settings, found.known_weights(settings), "kv", {}))


def test_different_facts_give_different_namespaces() -> None:
    seen = [
        identity(revision="1"),
        identity(revision="2"),
        identity(revision="1", tp_rank=1),
        identity(revision="1", tp_size=4),
        identity(revision="1", pp_rank=1),
        identity(revision="1", model_name="n"),
        identity(SimpleNamespace(kv_cache_dtype="fp8_e5m2"), revision="1"),
    ]
    assert len(set(seen)) == len(seen)
    latent = {"revision": "1", "is_mla_model": True}
    assert identity(**latent) == identity(**latent, tp_rank=1), "one latent for all ranks"


def test_weights_and_loras_without_a_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="revision"):
        identity()
    with pytest.raises(ConfigError, match="adapters"):
        identity(SimpleNamespace(enable_lora=True), revision="1")


class TestAudit:
    @pytest.fixture(params=[False, True], ids=["flat", "pieces"])
    def pages(self, store: kvdepot.Depot, request: pytest.FixtureRequest) -> HostPages:
        made = pages_of(store, LayerFirstPool(1), pieces=request.param)
        made.audit(AuditConfig(share=1, under_load=True), "SGLang 1")
        return made

    def test_an_audited_hit_is_a_page_short_and_other_numbers_end_all_hits(
        self, store: kvdepot.Depot, pages: HostPages
    ) -> None:
        keys, at = pages.keys(HASHES[:4], None, chained=False), torch.arange(4 * PAGE)
        assert all(pages.store(keys, at))
        assert store.audits.list()["compared"] == 0
        assert pages.served_pages(keys) == 3
        assert all(pages.store(keys, at))
        known = store.audits.list()
        assert (known["compared"], known["mismatched"]) == (1, 0)
        assert pages.served_pages(keys) == 3
        pages._pool.buffer = LayerFirstPool(2).buffer
        pages.store(keys, at)
        (found,) = store.audits.list()["quarantined"]
        assert found["made_by"] == found["found_by"] == "SGLang 1"
        assert len(store.match(keys)) == 0

    def test_hits_that_follow_at_once_count_as_load(self, store: kvdepot.Depot) -> None:
        made = pages_of(store, LayerFirstPool(1), pieces=False)
        made.audit(AuditConfig(share=1), "SGLang 1")
        keys = made.keys(HASHES[:4], None, chained=False)
        assert made.served_pages(keys) == 3, "the first after a pause"
        made._hit_s = time.monotonic() + 3600
        assert made.served_pages(keys) == 4

    def test_a_pool_without_numbers_is_not_audited(self, store: kvdepot.Depot) -> None:
        pool = LayerFirstPool(1)
        pool.dtype = torch.uint8
        made = pages_of(store, pool, pieces=False)
        made.audit(AuditConfig(share=1), "SGLang 1")
        assert made.served_pages(made.keys(HASHES[:4], None, chained=False)) == 4
