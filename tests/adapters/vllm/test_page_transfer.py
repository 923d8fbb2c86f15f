"""Loads and saves of pages: what is damaged in memory is no success, on a GPU neither."""

import pytest

pytest.importorskip("torch")

import torch
from tests.support.toy_engine import OpenStore

from kvdepot.adapters.tensors import HostMover, KVTensors
from kvdepot.adapters.vllm.messages import LoadJob, SaveJob
from kvdepot.adapters.vllm.metrics import ConnectorCounts
from kvdepot.adapters.vllm.page_transfer import FinishedLoad, Loader, PagedCache, Saver
from kvdepot.core.block import BlockKey
from kvdepot.core.depot import Depot
from kvdepot.core.layout import KVLayout

PAGES, PAGE_TOKENS = 6, 4
PAGE_BYTES = PAGE_TOKENS * 2 * 64 * 4 * 2


class CudaStandIn(HostMover):
    """Copies in host memory, and says that its tensors are on a GPU: no CUDA device is needed."""

    device = torch.device("cuda")


def cache_of(mover: HostMover) -> PagedCache:
    layers = [torch.rand(PAGES, PAGE_TOKENS, 2, 64) for _ in range(2)]
    return PagedCache(KVTensors(layers, "page token head dim", order="token head dim"), mover, 1)


def keys_of(store: Depot) -> list[BlockKey]:
    layout = KVLayout.opaque(PAGE_BYTES, PAGE_TOKENS)
    return store.namespace(model="m", layout=layout).keys(range(PAGES * PAGE_TOKENS))


def save(store: Depot, cache: PagedCache, keys: list[BlockKey]) -> int | None:
    saver = Saver(store, cache, ConnectorCounts())
    unsaved = saver.save(SaveJob("r", "", (tuple(keys),), tuple(range(len(keys))), 0), keys)
    saver.close()
    return unsaved


def load(store: Depot, cache: PagedCache, keys: list[BlockKey]) -> FinishedLoad:
    loader = Loader(store, cache, ConnectorCounts(), 1)
    job = LoadJob("r", "", (tuple(keys),), tuple(range(len(keys))), 0, timeout_s=20.0)
    loader.submit(job, keys)
    loader.close()
    (finished,) = loader.take()
    return finished


@pytest.mark.parametrize("mover", [HostMover, CudaStandIn])
def test_one_flipped_bit_is_recomputed(open_store: OpenStore, mover: type[HostMover]) -> None:
    with open_store() as store:
        cache, keys = cache_of(mover()), keys_of(store)
        assert save(store, cache, keys) is None
        assert load(store, cache, keys).end.failed_block is None
        with store.lease(keys) as lease:
            view = lease.view(3)
            assert view is not None
            for part in store.memory:
                at = bytes(part).find(view)
                if at >= 0:
                    part[at + 777] ^= 1
        finished = load(store, cache, keys)
        assert finished.end.failed_block == 3
        assert finished.failed_pages == frozenset(range(3, PAGES))
