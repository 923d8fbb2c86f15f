"""The CUDA mover against the host's: same payloads, same tensors, on a real device.

Run where there is one: PYTHONPATH=src python -m pytest -q tests/gpu
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from kvdepot.adapters.tensors import HostMover, KVTensors, Pieces
from kvdepot.errors import BadBufferError

pytestmark = pytest.mark.gpu

DEVICE = "cuda:0"
MIB = 1 << 20
MEMORY_BYTES = 160 * MIB
POISON = 0xEE

if torch.cuda.is_available():
    pytest.importorskip("triton")
    from kvdepot.adapters.tensors.cuda import Mover
    from kvdepot.adapters.tensors.pagelock import PageLockError
else:
    pytest.skip(
        "no CUDA device; where there is one: PYTHONPATH=src python -m pytest tests/gpu",
        allow_module_level=True,
    )


class Area:
    """Memory like a store's arena, cut into payloads."""

    def __init__(self) -> None:
        self.map = mmap.mmap(-1, MEMORY_BYTES)
        self.view = memoryview(self.map)
        self.used = 0

    def payload(self, nbytes: int) -> memoryview:
        start = self.used
        self.used += -(-nbytes // 4096) * 4096
        assert self.used <= MEMORY_BYTES
        return self.view[start : start + nbytes]

    def filled(self, blocks: list[Pieces], generator: torch.Generator) -> list[memoryview]:
        """A payload of random bytes for each block."""
        views = [self.payload(block.nbytes) for block in blocks]
        for view in views:
            bits = torch.randint(0, 256, (view.nbytes,), dtype=torch.uint8, generator=generator)
            view[:] = bits.numpy().data
        return views


@pytest.fixture
def area() -> Area:
    return Area()


@pytest.fixture
def mover(area: Area) -> Iterator[Mover]:
    with Mover(lambda: [area.view], DEVICE, slice_bytes=4 * MIB) as opened:
        yield opened


@pytest.fixture
def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@dataclass(frozen=True)
class Layout:
    """Shapes of the tensors of one layer, or of all layers, and the names of their axes."""

    shapes: list[tuple[int, ...]]
    axes: str
    """May have "kv", and "layer" for a tensor of all layers: views of such tensors are moved."""
    layers: int
    dtype: torch.dtype
    order: str = "token head dim"
    skip: int = 0
    """Elements in front of each tensor, to make addresses odd."""

    def tensors(self, device: str, fill: int | torch.Generator) -> KVTensors:
        names = self.axes.split()
        count = 1 if "layer" in names else self.layers
        rows = [
            tuple(self._tensor(shape, fill, device) for shape in self.shapes) for _ in range(count)
        ]
        if "layer" in names:
            rows = [(layer,) for layer in rows[0][0].unbind(names.index("layer"))]
            names.remove("layer")
        if "kv" in names:
            rows = [row[0].unbind(names.index("kv")) for row in rows]
            names.remove("kv")
        return KVTensors(rows, " ".join(names), order=self.order)

    def _tensor(
        self, shape: tuple[int, ...], fill: int | torch.Generator, device: str
    ) -> torch.Tensor:
        count = torch.Size(shape).numel() + self.skip
        nbytes = count * self.dtype.itemsize
        if isinstance(fill, int):
            flat = torch.full((nbytes,), fill, dtype=torch.uint8)
        else:
            flat = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=fill)
        return flat.to(device).view(self.dtype)[self.skip :].view(shape)

    def blocks(self, tensors: KVTensors) -> list[Pieces]:
        if "page" in self.axes:
            return [tensors.pages(ids) for ids in ([7, 2, 3], [0, 6, 5], [1, 9, 4])]
        return [tensors.span(0, 32), tensors.span(64, 96), tensors.span(32, 64)]


BF16, FP16, BYTES = torch.bfloat16, torch.float16, torch.uint8
LAYOUTS = {
    "kv-page": Layout([(2, 10, 16, 8, 128)], "kv page token head dim", 4, BF16),
    "page-kv": Layout([(10, 2, 16, 8, 128)], "page kv token head dim", 4, FP16),
    "packed": Layout([(10, 6, 2, 16, 4, 64)], "page layer kv token head dim", 6, BF16),
    "rectangles": Layout([(16, 10, 16, 8, 256)], "layer page token head dim", 16, BF16),
    "heads-first": Layout([(10, 2, 4, 16, 128)], "page kv head token dim", 3, BF16),
    "mla": Layout([(10, 64, 576)], "page token dim", 5, BF16),
    "mla-expanded": Layout(
        [(1, 4, 100, 192), (1, 4, 100, 128)], "batch head token dim", 3, BF16, "head token dim"
    ),
    "contiguous": Layout(
        [(1, 8, 128, 64)] * 2, "batch head token dim", 5, torch.float32, "head token dim"
    ),
    "fp8-as-bytes": Layout([(2, 10, 16, 4, 96)], "kv page token head dim", 3, BYTES),
    "odd-sizes": Layout([(2, 10, 5, 3, 7)], "kv page token head dim", 3, BYTES),
    "odd-words": Layout([(2, 10, 5, 3, 7)], "kv page token head dim", 3, BF16),
    "odd-addresses": Layout([(2, 10, 16, 2, 64)], "kv page token head dim", 3, BYTES, skip=1),
    "half-aligned": Layout([(2, 10, 16, 2, 64)], "kv page token head dim", 3, BF16, skip=4),
    "tiny-pieces": Layout(
        [(2, 10, 16, 4, 32)], "kv page token head dim", 3, BF16, "head dim token"
    ),
    "larger-than-a-slice": Layout([(2, 10, 64, 8, 128)], "kv page token head dim", 12, BF16),
}


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> Layout:
    return LAYOUTS[request.param]


def on_host(tensors: KVTensors, layout: Layout) -> KVTensors:
    """The same tensors, copied to the host with torch."""
    copies = [tensor.cpu() for tensor in tensors.tensors]
    width = len(copies) // tensors.layer_count
    rows = [tuple(copies[at : at + width]) for at in range(0, len(copies), width)]
    return KVTensors(rows, " ".join(tensors.axes), order=layout.order)


def same(left: KVTensors, right: KVTensors) -> bool:
    pairs = zip(left.tensors, right.tensors, strict=True)
    return all(torch.equal(bits(one), bits(two)) for one, two in pairs)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().contiguous().view(torch.uint8)


def test_offload_gives_the_payload_of_the_host_path(
    mover: Mover, area: Area, layout: Layout, generator: torch.Generator
) -> None:
    tensors = layout.tensors(DEVICE, generator)
    blocks = layout.blocks(tensors)
    views = [area.payload(block.nbytes) for block in blocks]
    mover.offload(blocks, views).wait()
    for view, block in zip(views, layout.blocks(on_host(tensors, layout)), strict=True):
        expected = bytearray(block.nbytes)
        HostMover().offload([block], [expected])
        assert bytes(view) == bytes(expected)


@pytest.mark.parametrize("layers_per_step", [None, 1, 2, 100])
def test_onboard_writes_what_the_host_path_writes_and_nothing_else(
    mover: Mover,
    area: Area,
    layout: Layout,
    generator: torch.Generator,
    layers_per_step: int | None,
) -> None:
    tensors, expected = layout.tensors(DEVICE, POISON), layout.tensors("cpu", POISON)
    blocks = layout.blocks(tensors)
    views = [view.toreadonly() for view in area.filled(blocks, generator)]
    mover.onboard(views, blocks, layers_per_step=layers_per_step).synchronize()
    HostMover().onboard(views, layout.blocks(expected))
    assert same(tensors, expected)


def test_many_calls_in_flight_do_not_disturb_each_other(
    mover: Mover, area: Area, generator: torch.Generator
) -> None:
    layout = LAYOUTS["kv-page"]
    sources = [layout.tensors(DEVICE, generator) for _ in range(6)]
    targets = [layout.tensors(DEVICE, POISON) for _ in range(6)]
    sent = [area.filled(layout.blocks(target), generator) for target in targets]
    taken = [[area.payload(one.nbytes) for one in layout.blocks(each)] for each in sources]
    tickets, arrivals = [], []
    for number in range(6):
        tickets.append(mover.offload(layout.blocks(sources[number]), taken[number]))
        arrivals.append(mover.onboard(sent[number], layout.blocks(targets[number])))
    for number in reversed(range(6)):
        tickets[number].wait()
        arrivals[number].synchronize()
    for number in range(6):
        down = [bytearray(view.nbytes) for view in taken[number]]
        HostMover().offload(layout.blocks(on_host(sources[number], layout)), down)
        assert [bytes(view) for view in taken[number]] == [bytes(each) for each in down]
        up = layout.tensors("cpu", POISON)
        HostMover().onboard(sent[number], layout.blocks(up))
        assert same(targets[number], up)


def test_a_layer_can_be_used_while_later_ones_are_in_flight(
    mover: Mover, area: Area, generator: torch.Generator
) -> None:
    layout = LAYOUTS["larger-than-a-slice"]
    tensors, expected = layout.tensors(DEVICE, POISON), layout.tensors("cpu", POISON)
    blocks = layout.blocks(tensors)
    views = area.filled(blocks, generator)
    HostMover().onboard(views, layout.blocks(expected))
    torch.cuda.synchronize()
    arrivals = mover.onboard(views, blocks, layers_per_step=1)
    seen = []
    for number, tensor in enumerate(tensors.tensors):
        arrivals.wait_layer(number // 2)
        seen.append(tensor.clone())  # a kernel on the current stream; the host does not wait
    torch.cuda.current_stream().synchronize()
    for copy, right in zip(seen, expected.tensors, strict=True):
        assert torch.equal(bits(copy), bits(right))


def test_layers_arrive_behind_a_busy_stream_of_the_caller(
    mover: Mover, area: Area, generator: torch.Generator
) -> None:
    """What the caller's stream was given before the call is done before the scatter."""
    layout = LAYOUTS["contiguous"]
    tensors, expected = layout.tensors(DEVICE, POISON), layout.tensors("cpu", 0)
    blocks = layout.blocks(tensors)
    views = area.filled(blocks, generator)
    HostMover().onboard(views, layout.blocks(expected))
    keep_busy()
    for tensor in tensors.tensors:
        tensor.zero_()
    mover.onboard(views, blocks).synchronize()
    assert same(tensors, expected)


def test_offload_sees_what_the_callers_stream_computed(
    mover: Mover, area: Area, generator: torch.Generator
) -> None:
    layout = LAYOUTS["kv-page"]
    tensors = layout.tensors(DEVICE, POISON)
    fresh = layout.tensors(DEVICE, generator)
    blocks = layout.blocks(tensors)
    views = [area.payload(block.nbytes) for block in blocks]
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        keep_busy()
        for target, source in zip(tensors.tensors, fresh.tensors, strict=True):
            target.copy_(source)
        ticket = mover.offload(blocks, views)
    ticket.wait()
    expected = [bytearray(view.nbytes) for view in views]
    HostMover().offload(layout.blocks(on_host(fresh, layout)), expected)
    assert [bytes(view) for view in views] == [bytes(each) for each in expected]


def test_blocks_may_be_written_to_after_wait_read(
    mover: Mover, area: Area, generator: torch.Generator
) -> None:
    layout = LAYOUTS["larger-than-a-slice"]
    tensors = layout.tensors(DEVICE, generator)
    kept = on_host(tensors, layout)
    blocks = layout.blocks(tensors)
    views = [area.payload(block.nbytes) for block in blocks]
    ticket = mover.offload(blocks, views)
    ticket.wait_read()
    for tensor in tensors.tensors:
        tensor.fill_(1)
    ticket.wait()
    expected = [bytearray(view.nbytes) for view in views]
    HostMover().offload(layout.blocks(kept), expected)
    assert [bytes(view) for view in views] == [bytes(each) for each in expected]


def test_tensors_may_be_dropped_while_they_are_offloaded(
    mover: Mover, area: Area, generator: torch.Generator
) -> None:
    layout = LAYOUTS["larger-than-a-slice"]
    tensors = layout.tensors(DEVICE, generator)
    kept = on_host(tensors, layout)
    shapes = [tensor.shape for tensor in tensors.tensors]
    blocks = layout.blocks(tensors)
    views = [area.payload(block.nbytes) for block in blocks]
    keep_busy()
    ticket = mover.offload(blocks, views)
    del tensors, blocks
    reused = [torch.full(shape, 1.0, dtype=layout.dtype, device=DEVICE) for shape in shapes]
    ticket.wait()
    expected = [bytearray(view.nbytes) for view in views]
    HostMover().offload(layout.blocks(kept), expected)
    assert [bytes(view) for view in views] == [bytes(each) for each in expected]
    assert reused


def keep_busy() -> None:
    """Some milliseconds of work on the current stream."""
    square = torch.ones(4096, 4096, device=DEVICE)
    for _ in range(20):
        square = square @ square * 1e-4


def test_mistakes_are_found_before_anything_moves(
    mover: Mover, area: Area, generator: torch.Generator
) -> None:
    layout = LAYOUTS["kv-page"]
    blocks = layout.blocks(layout.tensors(DEVICE, generator))
    size = blocks[0].nbytes
    good = area.payload(size)
    elsewhere, short = memoryview(bytearray(size)), area.payload(size - 1)
    wrong = {"outside": elsewhere, "bytes": short, "read-only": area.payload(size).toreadonly()}
    for reason, view in wrong.items():
        with pytest.raises(BadBufferError, match=reason):
            mover.offload(blocks[:2], [good, view])
    with pytest.raises(BadBufferError, match="cpu"):
        mover.offload(layout.blocks(layout.tensors("cpu", generator))[:1], [good])
    torch.cuda.synchronize()
    assert not any(good)
    mover.offload([], []).wait()
    mover.onboard([], []).synchronize()


def test_close_twice_and_not_usable_afterwards(area: Area, generator: torch.Generator) -> None:
    layout = LAYOUTS["mla"]
    blocks = layout.blocks(layout.tensors(DEVICE, generator))
    views = [area.payload(block.nbytes) for block in blocks]
    mover = Mover(lambda: [area.view], "cuda")
    ticket = mover.offload(blocks, views)
    mover.close()
    ticket.wait()
    mover.close()
    with pytest.raises(BadBufferError):
        mover.offload(blocks, views)


def test_inference_mode_makes_no_difference(area: Area, generator: torch.Generator) -> None:
    layout = LAYOUTS["mla"]
    with torch.inference_mode():
        mover = Mover(lambda: [area.view], DEVICE)
        inside, outside = layout.tensors(DEVICE, generator), layout.tensors(DEVICE, generator)
        blocks = layout.blocks(inside)
        views = [area.payload(block.nbytes) for block in blocks]
        mover.offload(blocks, views).wait()
    mover.onboard(views, layout.blocks(outside)).synchronize()
    again = [area.payload(block.nbytes) for block in blocks]
    mover.offload(layout.blocks(outside), again).wait()
    mover.close()
    assert [bytes(view) for view in again] == [bytes(view) for view in views]


def test_two_movers_share_the_memory(area: Area, generator: torch.Generator) -> None:
    layout = LAYOUTS["mla"]
    first, second = Mover(lambda: [area.view], DEVICE), Mover(lambda: [area.view], DEVICE)
    first.close()
    blocks = layout.blocks(layout.tensors(DEVICE, generator))
    views = [area.payload(block.nbytes) for block in blocks]
    second.offload(blocks, views).wait()
    second.close()
    assert any(views[0])


def test_refused_memory_leaves_the_device_usable(area: Area) -> None:
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    address = torch.frombuffer(area.view, dtype=torch.uint8).data_ptr()
    assert int(cudart.cudaHostRegister(address, 4096, 0)) == 0
    try:
        with pytest.raises(PageLockError):
            Mover(lambda: [area.view], DEVICE)
        assert torch.ones(8, device=DEVICE).sum().item() == 8
    finally:
        assert int(cudart.cudaHostUnregister(address)) == 0
    Mover(lambda: [area.view], DEVICE).close()
