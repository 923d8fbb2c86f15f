"""Settings in vLLM's extra config: read strictly, refused in one line."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from kvdepot.adapters.vllm.config import read
from kvdepot.adapters.vllm.identity import check_engine
from kvdepot.adapters.vllm.shared_depot import default_socket, embedded_name
from kvdepot.errors import ConfigError


def test_sizes_and_durations_are_read_as_everywhere() -> None:
    config = read(
        {
            "dram": "2GiB",
            "ssd": {"path": "/kv", "capacity": "20GiB"},
            "load_timeout": "250ms",
            "save": "prompt",
            "audit": {"tolerance": {"bfloat16": 0.2}},
        }
    )
    assert config.dram.capacity == 2 << 30
    assert config.ssd is not None
    assert config.ssd.path == (Path("/kv"),)
    assert config.load_timeout == 0.25
    assert config.audit.tolerance == {"bfloat16": 0.2}
    assert config.depot.ssd == config.ssd


def test_every_tier_that_can_be_set_is_in_the_depot(tmp_path: Path) -> None:
    tiers: dict[str, Any] = {
        "cxl": "1GiB",
        "ssd": {"path": "/kv", "capacity": "20GiB"},
        "hdd": {"path": "/hd", "capacity": "20GiB"},
        "object": {"url": f"file://{tmp_path}", "capacity": "1GiB"},
    }
    depot = read(tiers).depot
    assert [name for name in tiers if getattr(depot, name) is None] == []


@pytest.mark.parametrize(
    ("extra", "setting"),
    [
        ({"dramm": "1GiB"}, "kv_connector_extra_config.dramm"),
        ({"ssd": {"path": "/kv", "capcity": 1}}, "kv_connector_extra_config.ssd.capcity"),
        ({"ssd": {"path": "/kv"}}, "kv_connector_extra_config.ssd.capacity"),
        ({"load_threads": 0}, "kv_connector_extra_config.load_threads"),
        ({"load_timeout": "0s"}, "kv_connector_extra_config.load_timeout"),
        ({"wait": -1}, "kv_connector_extra_config.wait"),
        ({"save": "some"}, "kv_connector_extra_config.save"),
        ({"block_tokens": -1}, "kv_connector_extra_config.block_tokens"),
        ({"tenant": "a", "tenants": {"b": {}}}, "kv_connector_extra_config.tenant"),
        ({"audit": {"share": 7}}, "kv_connector_extra_config.audit.share"),
    ],
)
def test_an_invalid_setting_is_named(extra: dict[str, Any], setting: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(extra)
    assert str(caught.value).startswith(f"{setting}: ")


def engine(**transfer: Any) -> Any:
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(**{"kv_load_failure_policy": "recompute", **transfer}),
        parallel_config=SimpleNamespace(pipeline_parallel_size=2),
        cache_config=SimpleNamespace(),
    )


def test_engines_that_would_fail_requests_are_refused() -> None:
    check_engine(engine())
    with pytest.raises(ConfigError, match="kv_load_failure_policy"):
        check_engine(engine(kv_load_failure_policy="fail"))
    divided = engine()
    divided.parallel_config.decode_context_parallel_size = 2
    with pytest.raises(ConfigError, match="decode_context_parallel_size"):
        check_engine(divided)
    scaled = engine()
    scaled.cache_config.calculate_kv_scales = True
    with pytest.raises(ConfigError, match="calculate_kv_scales"):
        check_engine(scaled)


def test_each_set_of_disks_has_its_socket() -> None:
    one = read({"ssd": {"path": "/kv/a", "capacity": "1GiB"}})
    other = read({"ssd": {"path": "/kv/b", "capacity": "1GiB"}})
    larger = read({"ssd": {"path": "/kv/a", "capacity": "2GiB"}})
    assert default_socket(one) == default_socket(larger) != default_socket(other)
    assert embedded_name(one) != embedded_name(larger)
    with pytest.raises(ConfigError, match="socket"):
        default_socket(read({}))
