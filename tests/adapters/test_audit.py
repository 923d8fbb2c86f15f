"""Which hits are audited, and how far two versions of a block may be apart."""

import logging
from typing import Any

import numpy as np
import pytest

import kvdepot
from kvdepot.adapters.audit import AuditedHits, BlockAuditor, HitChooser, compare
from kvdepot.config.settings import AUDIT_TOLERANCE, AuditConfig
from kvdepot.core.block import BlockKey
from kvdepot.core.depot import NamespaceHandle
from kvdepot.core.layout import KVLayout
from kvdepot.errors import ConfigError
from kvdepot.store.store import Store

LAYOUT = KVLayout.gqa(layers=3, kv_heads=2, head_dim=64, dtype="float32", block_tokens=16)
LOG = logging.getLogger("tests.audit")
KEY = BlockKey(bytes(range(32)))
OTHER = BlockKey(bytes(32))


def numbers(seed: int = 1) -> Any:
    count = LAYOUT.block_bytes // 4
    return np.random.default_rng(seed).standard_normal(count).astype(np.float32)


class TestChoice:
    def test_none_unless_asked_for(self) -> None:
        chooser = HitChooser(AuditConfig())
        assert not any(chooser.choose(KEY, busy=False) for _ in range(1000))

    def test_the_first_hit_and_then_one_in_fifty(self) -> None:
        chooser = HitChooser(AuditConfig(share=0.02))
        chosen = [at for at in range(1000) if chooser.choose(KEY, busy=False)]
        assert chosen == list(range(0, 1000, 50))

    def test_each_namespace_by_itself(self) -> None:
        chooser = HitChooser(AuditConfig(share=0.1))
        assert chooser.choose(KEY, busy=False)
        assert not chooser.choose(KEY, busy=False)
        assert chooser.choose(OTHER, busy=False)

    def test_waits_for_an_idle_moment(self) -> None:
        chooser = HitChooser(AuditConfig(share=0.02))
        assert not any(chooser.choose(KEY, busy=True) for _ in range(500))
        assert [chooser.choose(KEY, busy=False) for _ in range(3)] == [True, False, False]

    def test_audits_under_load_if_set(self) -> None:
        chooser = HitChooser(AuditConfig(share=0.02, under_load=True))
        assert sum(chooser.choose(KEY, busy=True) for _ in range(500)) == 10


@pytest.mark.parametrize(
    ("settings", "path"),
    [
        ({"share": 1.5}, "audit.share"),
        ({"share": -0.1}, "audit.share"),
        ({"tolerance": {"float99": 0.1}}, "audit.tolerance.float99"),
        ({"tolerance": {"float16": 0.0}}, "audit.tolerance.float16"),
    ],
)
def test_invalid_settings(settings: dict[str, Any], path: str) -> None:
    with pytest.raises(ConfigError) as error:
        AuditConfig(**settings)
    assert error.value.path == path


class TestComparison:
    def test_equal(self) -> None:
        assert compare(numbers(), numbers(), LAYOUT).error == 0

    def test_noise_gives_a_small_error(self) -> None:
        noise = 0.003 * np.random.default_rng(2).standard_normal(len(numbers()))
        found = compare(numbers(), (numbers() + noise).astype(np.float32), LAYOUT)
        assert 0.001 < found.error < 0.006

    def test_names_the_layer(self) -> None:
        wrong = numbers().reshape(3, -1).copy()
        wrong[1] = -wrong[1]
        found = compare(numbers(), wrong, LAYOUT)
        assert found.layer == 1
        assert found.error == pytest.approx(2)

    def test_a_small_v_beside_a_large_k(self) -> None:
        kept = numbers().reshape(3, 2, -1)
        kept[:, 1] *= 1e-3
        wrong = kept.copy()
        wrong[:, 1] = np.roll(wrong[:, 1], 1, axis=1)
        assert compare(kept, wrong, LAYOUT).error > 1

    def test_a_token_that_took_another_expert_is_no_mismatch(self) -> None:
        kept = numbers().reshape(3, 2, 2, 16, 64)
        other = kept.copy()
        other[1:, :, :, 5] *= -1
        assert compare(kept, other, LAYOUT).error == 0

    @pytest.mark.parametrize("value", [np.nan, np.inf])
    def test_nan_and_infinity_agree_with_nothing(self, value: float) -> None:
        broken = np.full_like(numbers(), value)
        assert compare(numbers(), broken, LAYOUT).error == 2
        assert compare(broken, broken, LAYOUT).error == 2

    def test_zeros_agree_with_zeros_alone(self) -> None:
        zeros = np.zeros_like(numbers())
        assert compare(zeros, zeros, LAYOUT).error == 0
        assert compare(zeros, numbers(), LAYOUT).error == pytest.approx(2)

    def test_plain_bytes_cannot_be_compared(self) -> None:
        layout = KVLayout.opaque(4096, 16)
        with pytest.raises(ValueError, match="uint8"):
            compare(bytes(4096), bytes(4096), layout)


@pytest.mark.parametrize("dtype", sorted(AUDIT_TOLERANCE))
def test_each_dtype_reads_as_torch_does(dtype: Any) -> None:
    torch = pytest.importorskip("torch")
    from kvdepot.adapters.audit import DECODERS
    from kvdepot.adapters.tensors.kvtensors import DTYPES

    kind = next(torch_type for torch_type, name in DTYPES.items() if name == dtype)
    width = torch.empty(0, dtype=kind).element_size()
    raw = np.random.default_rng(5).integers(0, 256, 4096 * width, dtype=np.uint8)
    if width == 1:
        raw = np.arange(256, dtype=np.uint8)
    expected = torch.from_numpy(raw.copy()).view(kind).to(torch.float32).numpy()
    found = DECODERS[dtype](raw)
    finite = np.isfinite(expected)
    assert np.array_equal(found[finite], expected[finite])
    assert not np.isfinite(found[~finite]).any()


@pytest.fixture
def store() -> Any:
    dram = {"capacity": "8MiB", "huge_pages": "never", "prefault": False}
    with kvdepot.open(dram=dram) as store:
        yield store


@pytest.fixture
def space(store: Store) -> NamespaceHandle:
    return store.namespace(model="m", layout=LAYOUT)


class TestAuditor:
    def auditor(self, store: Store, **settings: Any) -> BlockAuditor:
        return BlockAuditor(store, AuditConfig(share=1, **settings), "engine 2", LOG)

    def test_a_block_that_agrees(self, store: Store, space: NamespaceHandle) -> None:
        (key,) = space.keys(range(16))
        store.put_many([key], [numbers()])
        assert self.auditor(store).check(key, numbers() * np.float32(1.001), LAYOUT)
        assert store.audits.list()["compared"] == 1
        assert len(store.match([key])) == 1

    def test_a_block_that_differs(
        self, store: Store, space: NamespaceHandle, caplog: pytest.LogCaptureFixture
    ) -> None:
        (key,) = space.keys(range(16))
        store.put_many([key], [numbers()])
        with caplog.at_level(logging.ERROR):
            assert self.auditor(store).check(key, numbers(2), LAYOUT) is False
        assert "AUDIT FAILED" in caplog.text
        assert len(store.match([key])) == 0

    def test_the_tolerance_is_a_setting(self, store: Store, space: NamespaceHandle) -> None:
        (key,) = space.keys(range(16))
        store.put_many([key], [numbers()])
        auditor = self.auditor(store, tolerance={"float32": 0.0001})
        assert auditor.check(key, numbers() * np.float32(1.001), LAYOUT) is False

    def test_a_block_that_was_removed(self, store: Store, space: NamespaceHandle) -> None:
        (key,) = space.keys(range(16))
        assert self.auditor(store).check(key, numbers(), LAYOUT) is None
        assert store.audits.list()["compared"] == 0

    def test_scratch_leaves_nothing_behind(self, store: Store, space: NamespaceHandle) -> None:
        (key,) = space.keys(range(16))
        before = store.stats()["tiers"]["dram"]["used_bytes"]
        with self.auditor(store).scratch(key) as slot:
            view = slot.view(0)
            assert view is not None
            assert len(view) == LAYOUT.block_bytes
        assert store.stats()["blocks"] == 0
        assert store.stats()["tiers"]["dram"]["used_bytes"] == before


class TestHits:
    def test_the_last_block_of_a_chosen_hit_is_expected_once(self, store: Store) -> None:
        hits = AuditedHits(store, AuditConfig(share=1), "engine 2", LOG)
        assert hits.served_blocks([OTHER, KEY], busy=False) == 1
        assert hits.is_expected(KEY) and not hits.is_expected(OTHER)
        assert [hits.take_expected(KEY), hits.take_expected(KEY)] == [True, False]
        assert hits.served_blocks([], busy=False) == 0

    def test_blocks_that_never_come_are_forgotten(self, store: Store) -> None:
        hits = AuditedHits(store, AuditConfig(share=1), "engine 2", LOG)
        keys = [BlockKey(number.to_bytes(32, "big")) for number in range(200)]
        hits.expect(keys)
        assert [hits.take_expected(keys[at]) for at in (0, -1)] == [False, True]
