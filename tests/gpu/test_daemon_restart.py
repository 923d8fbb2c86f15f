"""A CUDA mover over a daemon that is killed and restarted, on a real device.

Run where there is one: PYTHONPATH=src python -m pytest -q tests/gpu
"""

from __future__ import annotations

import gc
import time
from pathlib import Path

import pytest
import torch

import kvdepot
from kvdepot.adapters.tensors import KVTensors, open_mover
from kvdepot.errors import BadBufferError
from kvdepot.testing.daemons import DaemonProcess

pytestmark = pytest.mark.gpu

if not torch.cuda.is_available():
    pytest.skip(
        "no CUDA device; where there is one: PYTHONPATH=src python -m pytest tests/gpu",
        allow_module_level=True,
    )

TOKENS = 64


def resident_kib() -> int:
    """Page-locked memory is resident; the kernel does not count it apart."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


def mapped_arenas() -> int:
    return Path("/proc/self/maps").read_text().count("kvdepot-arena")


def test_hits_are_back_and_locked_memory_is_flat(tmp_path: Path) -> None:
    cache = [torch.randn(4, 16, 2, 64, device="cuda") for _ in range(2)]
    tensors = KVTensors(cache, "page token head dim")
    pieces = tensors.pages([0, 1, 2, 3])
    layout = kvdepot.KVLayout.opaque(pieces.nbytes, TOKENS)
    before = [layer.clone() for layer in cache]
    settings = {"dram": "512MiB", "ssd": {"path": str(tmp_path / "kv"), "capacity": "1GiB"}}
    with (
        DaemonProcess(tmp_path, settings) as daemon,
        kvdepot.open(daemon.address) as store,
        open_mover(lambda: store.memory, "cuda") as mover,
    ):
        keys = store.namespace(model="m", layout=layout).keys(range(TOKENS))
        with store.reserve(keys) as slots:
            mover.offload([pieces], [slots.view(0)]).wait()
            slots.seal()
        assert store.flush()
        resident, arenas = resident_kib(), mapped_arenas()
        for _ in range(3):
            daemon.kill()
            daemon.start()
            for layer in cache:
                layer.zero_()
            started = time.monotonic()
            while True:
                assert time.monotonic() < started + 20.0, "no hit again"
                try:
                    with store.lease(keys) as lease:
                        answers = lease.deliver(
                            lambda arrivals: mover.onboard(
                                [one.view for one in arrivals], [pieces] * len(arrivals)
                            ).synchronize(),
                            verify_concurrently=True,
                        )
                except BadBufferError:
                    answers = []
                if answers and all(answers):
                    break
                time.sleep(0.01)
            assert all(map(torch.equal, cache, before))
            gc.collect()
            assert mapped_arenas() == arenas
            assert resident_kib() < resident + (64 << 10)
