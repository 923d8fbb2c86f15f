"""The settings of a tier below vLLM's, and the identity of its chunks. Without vLLM."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvdepot.adapters.vllm_tier.config import read
from kvdepot.adapters.vllm_tier.identity import engine_config, identify
from kvdepot.errors import ConfigError

DISK = {"path": "/kv", "capacity": "1GiB"}


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({}, "ssd"),
        ({"ssd": DISK, "policy": "some"}, "policy"),
        ({"ssd": DISK, "locality": "near"}, "locality"),
        ({"ssd": {"path": "/kv", "capcity": 1}}, "ssd.capcity"),
        ({"ssd": DISK, "load_threads": 0}, "load_threads"),
        ({"ssd": DISK, "load_timeout": "0s"}, "load_timeout"),
        ({"ssd": DISK, "tenant": "a"}, "tenant"),
        ({"ssd": DISK, "root_dir": "/kv"}, "root_dir"),
    ],
)
def test_an_invalid_setting_is_named(settings: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(settings)
    assert str(caught.value).startswith(f"secondary_tiers.KVDepotTier.{name}: ")


def test_all_lower_tiers_reach_the_depot() -> None:
    folder = {"url": "file:///mnt/kv", "capacity": "1GiB"}
    depot = read({"ssd": DISK, "hdd": {**DISK, "path": "/hdd"}, "object": folder}).depot
    assert [tier.TIER for tier in depot.lower_tiers] == ["ssd", "hdd", "object"]


def test_loads_go_past_our_memory_unless_set() -> None:
    """vLLM's CPU tier is the cache; what lies below the first tier is promoted to that one."""
    below = {**DISK, "path": "/hdd"}
    depot = read({"ssd": DISK, "hdd": below, "dram": {"capacity": "1GiB"}}).depot
    assert [tier.promote for tier in depot.lower_tiers] == [False, True]
    assert not depot.dram.prefault and not read({"hdd": below}).depot.dram.prefault
    assert not read({"hdd": below}).depot.lower_tiers[0].promote
    asked = read(
        {"ssd": {**DISK, "promote": True}, "dram": {"capacity": 1 << 30, "prefault": True}}
    )
    assert asked.depot.lower_tiers[0].promote and asked.depot.dram.prefault
    assert depot.writeback.prefault and read({"hdd": below}).depot.writeback.prefault
    staging = {"staging": "8MiB"}
    assert read({"ssd": DISK, "writeback": staging}).depot.writeback.prefault
    off = {"ssd": DISK, "writeback": {**staging, "prefault": False}}
    assert not read(off).depot.writeback.prefault


def spec(**more: Any) -> Any:
    cache = SimpleNamespace(tokens_per_hash=16, blocks_per_chunk=2)
    sizes = ("world_size", "tp_size", "pp_size", "pcp_size", "dcp_size")
    offload = {
        "model": SimpleNamespace(name="m", dtype="float16"),
        "cache": cache,
        "groups": (SimpleNamespace(group_id=3, tokens_per_block=16, layer_names=("a",)),),
        "parallel": SimpleNamespace(
            **dict.fromkeys(sizes, more.pop("workers", 1)),
            is_parallelism_agnostic=more.pop("agnostic", False),
        ),
        "kv_cache_layout": "LBHNC",
        "canonical_layout": False,
        "replicated_layout": False,
        "worker_kv_bytes_per_block": 1024,
        **more,
    }
    return SimpleNamespace(config=SimpleNamespace(**offload))


def engine(**more: Any) -> Any:
    model = SimpleNamespace(
        model="org/m",
        dtype="float16",
        quantization=None,
        seed=1,
        hf_config=SimpleNamespace(to_dict=lambda: {"layers": 2}, _commit_hash="abc"),
    )
    cache = SimpleNamespace(cache_dtype="auto", prefix_caching_hash_algo="sha256")
    load = SimpleNamespace(load_format="auto")
    return SimpleNamespace(model_config=model, cache_config=cache, load_config=load, **more)


def tags(settings: dict[str, Any] | None = None, of: Any = None, offload: Any = None) -> bytes:
    config = read({"ssd": DISK, **(settings or {})})
    found = identify(offload or spec(), of or engine(), config, 4096, "0.32")
    weights = found.weights.known(config.weights)
    (group,) = found.namespaces(config, weights).items()
    assert group[0] == 3
    assert group[1].block_tokens == 32
    return group[1].tag


def test_each_difference_makes_another_namespace() -> None:
    other_model, quantized, wider = engine(), engine(), engine()
    other_model.model_config.hf_config.to_dict = lambda: {"layers": 3}
    quantized.model_config.quantization = "fp8"
    wider.model_config.max_model_len = 9
    commit = engine()
    commit.model_config.hf_config._commit_hash = "abd"
    seen = [
        tags(),
        tags(of=other_model),
        tags(of=quantized),
        tags(of=wider),
        tags(of=commit),
        tags({"revision": "1"}),
        tags({"tenants": {"a": {"secret_file": __file__}}, "tenant": "a"}),
        tags(offload=spec(kv_cache_layout="BLHNC")),
        tags(offload=spec(worker_kv_bytes_per_block=2048)),
        tags(offload=spec(workers=2)),
        tags(offload=spec(agnostic=True)),
        tags(offload=spec(replicated_layout=True)),
        tags({"adapters": "a"}, of=engine(lora_config=SimpleNamespace(lora_dtype="auto"))),
    ]
    assert len(set(seen)) == len(seen)
    assert tags() == seen[0]


@pytest.mark.parametrize("same", ["agnostic", "replicated_layout"])
def test_chunks_that_are_the_same_for_any_workers_are_one_namespace(same: str) -> None:
    one, other = ({same: True, "workers": count} for count in (2, 4))
    other["worker_kv_bytes_per_block"] = 512
    assert tags(offload=spec(**one)) == tags(offload=spec(**other))


def test_engines_that_would_be_served_wrong_are_refused() -> None:
    with pytest.raises(ConfigError, match="adapters"):
        tags(of=engine(lora_config=SimpleNamespace()))
    colliding = engine()
    colliding.cache_config.prefix_caching_hash_algo = "xxhash"
    with pytest.raises(ConfigError, match="prefix_caching_hash_algo"):
        tags(of=colliding)
    scaled = engine()
    scaled.cache_config.calculate_kv_scales = True
    with pytest.raises(ConfigError, match="calculate_kv_scales"):
        tags(of=scaled)
    with pytest.raises(ConfigError, match="revision"):
        identify(spec(), None, read({"ssd": DISK}), 4096, "0.32")


def test_the_engines_configuration_is_found_among_the_callers() -> None:
    def caller(vllm_config: object) -> object:
        return engine_config(Path)

    assert caller(Path("here")) == Path("here")
    assert caller("another thing") is None
