"""Sequences of a real llama.cpp context, by its C interface: the same logits to the last bit."""

import ctypes
from collections.abc import Iterator

import pytest

import kvdepot
from kvdepot.adapters.hf import smollm2
from kvdepot.adapters.llama_cpp import SequenceCache
from kvdepot.depot import Depot
from kvdepot.errors import ModelError

TOKENS = [1, *range(300, 346)]


@pytest.fixture
def depot() -> Iterator[Depot]:
    dram = {"capacity": "64MiB", "prefault": False, "huge_pages": "never"}
    with kvdepot.open(dram=dram) as store:
        yield store


def test_a_library_that_is_not_llama_cpp_is_refused(depot: Depot) -> None:
    with pytest.raises(ModelError, match="llama_state_seq_get_size"):
        SequenceCache(depot, ctypes.CDLL(None), 1, model=smollm2.gguf_file())


@pytest.mark.slow
@pytest.mark.parametrize("unified", [True, False])
def test_a_restored_sequence_computes_the_same(depot: Depot, unified: bool) -> None:
    pytest.importorskip("xllamacpp")
    from tests.support.llama_library import LlamaContext

    model = smollm2.gguf_file()
    with LlamaContext(model, unified=unified) as llama:
        cache = SequenceCache(depot, llama.library, llama.context, model=model, block_tokens=16)
        assert cache.restore(TOKENS) == 0
        wanted = llama.decode(TOKENS, 0, 0)
        assert cache.store(TOKENS) == 2
        assert cache.store(TOKENS) == 0
        assert cache.restore(TOKENS, 1) == 32
        assert llama.decode(TOKENS[32:], 32, 1) == wanted
        # A longer sequence with the same beginning: the new part is read by itself.
        more = TOKENS + list(range(400, 417))
        longer = llama.decode(more[len(TOKENS) :], len(TOKENS), 1)
        assert cache.store(more, 1) == 2
        assert depot.stats()["blocks"] == 4
    with LlamaContext(model, unified=unified) as llama:
        cache = SequenceCache(depot, llama.library, llama.context, model=model, block_tokens=16)
        assert cache.restore(more) == 48
        assert llama.decode(more[48:], 48, 0) == longer
        # All but the last token may be restored: it is decoded for its logits.
        assert cache.restore(more[:48]) == 32
