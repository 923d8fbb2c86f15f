"""Pages of a device pool as SGLang has them, through a depot and back, on a real device.

The pool is our own. Run where there is one: PYTHONPATH=src python -m pytest -q tests/gpu
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.device_pool import PAGES, DevicePool, indices

import kvdepot
from kvdepot.adapters.sglang.device_pages import DevicePages
from kvdepot.adapters.tensors import open_mover

pytestmark = pytest.mark.gpu

if not torch.cuda.is_available():
    pytest.skip(
        "no CUDA device; where there is one: PYTHONPATH=src python -m pytest tests/gpu",
        allow_module_level=True,
    )

HASHES = [f"{number:064x}" for number in range(PAGES)]
LIMIT_S = 20.0


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"widths": (256, 256, 192, 192), "paged": True},
        {"widths": (64, 64, 48), "layers": {0: (0, 2), 1: 1}},
    ],
)
def test_pages_come_back_layer_by_layer_after_a_restart(
    tmp_path: Path, shape: dict[str, Any]
) -> None:
    source = DevicePool(1, device="cuda:0", **shape)
    target = DevicePool(2, device="cuda:0", **shape)
    parts: dict[str, Any] = {
        "dram": "64MiB",
        "ssd": {"path": tmp_path / "kv", "capacity": "256MiB"},
    }
    order = [(5 * at) % PAGES for at in range(PAGES)]
    for pool in (source, target):
        with (
            kvdepot.open(**parts) as store,
            open_mover(lambda: store.memory, "cuda:0") as mover,
        ):
            pages = DevicePages(store, pool, mover)
            pages.register({"model": "m", "extra": tuple(pages.identity().items())})
            keys = pages.keys(HASHES, None, chained=False)
            if pool is source:
                assert all(pages.store(keys, indices(range(PAGES)).cuda()))
                assert store.flush(LIMIT_S)
                continue
            leased = pages.lease(keys, indices(order).cuda(), LIMIT_S)
            assert leased is not None
            for layer in range(len(pool.layer_mapping)):
                for ticket in pages.onboard([layer], leased.rows, leased.views):
                    ticket.synchronize()
            leased.release()
    assert all(target.has(at, source, number) for number, at in enumerate(order))
