"""One config tree: every source, every type, every mistake."""

import json
import tomllib
from collections.abc import Mapping
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdepot.config.loader import REMOVED_SETTINGS, developer_options, show, to_toml
from kvdepot.config.settings import (
    GIB,
    KIB,
    MIB,
    Config,
    DramConfig,
    LedgerConfig,
    PluginConfig,
    SessionsConfig,
    SsdConfig,
    TenantConfig,
    WritebackConfig,
    load,
)
from kvdepot.core.volume import VOLUMES_MAX
from kvdepot.errors import ConfigError

SSD = {"path": "/data", "capacity": "20GiB"}


def ssd(**overrides: Any) -> SsdConfig:
    config = load(overrides={"ssd": {**SSD, **overrides}}).ssd
    assert config is not None
    return config


def test_defaults() -> None:
    assert load() == Config()
    assert load().dram.capacity == GIB
    assert load().writeback == WritebackConfig(dirty_limit=0.5, staging=64 * MIB, put_timeout=0.25)
    assert ssd() == SsdConfig(path=(Path("/data"),), capacity=20 * GIB)
    assert (ssd().read_timeout, ssd().retry_initial, ssd().io_depth) == (2.0, 0.1, 32)


def test_the_tree_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        load().dram.capacity = 1  # type: ignore[misc]


def test_later_sources_win_field_by_field(tmp_path: Path) -> None:
    file = tmp_path / "kvdepot.toml"
    file.write_text(
        'block_tokens = 64\n[dram]\ncapacity = "2GiB"\nlock = true\nverify = false\n'
        '[ssd]\npath = ["/a", "/b"]\ncapacity = "40GiB"\n'
    )
    env = {
        "KVDEPOT_DRAM__CAPACITY": "3GiB",
        "KVDEPOT_SSD__READ_TIMEOUT": "1s",
        "OTHER": "x",
        "KVDEPOTIST": "x",
    }
    config = load(file, env=env, overrides={"dram": {"verify": True}, "ssd.io_depth": 8})
    assert config.block_tokens == 64
    assert config.dram == DramConfig(capacity=3 * GIB, lock=True, verify=True)
    assert config.ssd == SsdConfig(
        path=(Path("/a"), Path("/b")), capacity=40 * GIB, read_timeout=1.0, io_depth=8
    )


def test_a_bare_size_is_the_capacity_of_dram(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('[dram]\nlock = true\ncapacity = "5GiB"\n')
    assert load(overrides={"dram": "2GiB"}).dram.capacity == 2 * GIB
    assert load(overrides={"dram": 2 * GIB}).dram.capacity == 2 * GIB
    assert load(file, overrides={"dram": "2GiB"}).dram == DramConfig(capacity=2 * GIB, lock=True)
    file.write_text('dram = "5GiB"\n')
    env = {"KVDEPOT_DRAM__LOCK": "on"}
    assert load(file, env=env).dram == DramConfig(capacity=5 * GIB, lock=True)
    both = {"KVDEPOT_DRAM": "2GiB", "KVDEPOT_DRAM__LOCK": "on"}
    assert load(file, env=both).dram == DramConfig(capacity=2 * GIB, lock=True)


def test_objects_and_none_as_overrides(tmp_path: Path) -> None:
    given_ssd = SsdConfig(path=(Path("/x"),), capacity=GIB, io_depth=3)
    assert load(overrides={"ssd": given_ssd, "dram": DramConfig()}).ssd == given_ssd
    file = tmp_path / "c.toml"
    file.write_text('[ssd]\npath = "/a"\ncapacity = "40GiB"\n')
    assert load(file, overrides={"ssd": None}).ssd is None
    assert load(file, env={"KVDEPOT_SSD": "none"}).ssd is None
    assert load(file, overrides={"ssd": None, "ssd.path": "/a", "ssd.capacity": "1GiB"}).ssd


def test_paths_from_one_text_or_a_list() -> None:
    assert ssd(path="/one").path == (Path("/one"),)
    assert ssd(path=Path("/one")).path == (Path("/one"),)
    assert ssd(path=["/one", Path("/two")]).path == (Path("/one"), Path("/two"))
    assert ssd(path='["/a,b", "/c"]').path == (Path("/a,b"), Path("/c"))
    assert ssd(path="~/kv").path == (Path.home() / "kv",)


def test_tables_from_the_environment() -> None:
    config = load(env={"KVDEPOT_SSD": '{path = "/a", capacity = "1GiB"}'})
    assert config.ssd == SsdConfig(path=(Path("/a"),), capacity=GIB)
    config = load(env={"KVDEPOT_TENANTS__ACME__SECRET_HEX": "00ff"})
    assert config.tenants["acme"].secret() == b"\x00\xff"


@pytest.mark.parametrize(
    ("overrides", "path", "says"),
    [
        ({"drma": 1}, "drma", "known: block_tokens, dram, cxl"),
        ({"dram": {"capcity": 1}}, "dram.capcity", "known: capacity, huge_pages"),
        ({"dram": {3: 1}}, "dram", "names must be text"),
        ({"dram.verify.x": 1}, "dram.verify", "not true or false"),
        ({"tenants.a.secrets": 1}, "tenants.a.secrets", "unknown key"),
        ({"ssd": "/data"}, "ssd", "path and capacity"),
        ({"ssd": {"path": "/data"}}, "ssd.capacity", "missing"),
        ({"ssd": {}}, "ssd.path", "missing"),
        ({"writeback": 3}, "writeback", "needs a table"),
        ({"tenants": 3}, "tenants", "table of tables"),
        ({"tenants": {"a": "x"}}, "tenants.a", "needs a table"),
        ({"tenants": {"": {}}}, "tenants", "empty"),
        ({"dram": None}, "dram", "needs a table"),
        ({"dram": "2 quid"}, "dram.capacity", "64GiB"),
        ({"dram": "-1GiB"}, "dram.capacity", "64GiB"),
        ({"dram": -1}, "dram.capacity", "negative"),
        ({"dram": 0}, "dram.capacity", "at least 4KiB"),
        ({"dram": "2"}, "dram.capacity", "at least 4KiB"),
        ({"dram": 1 << 63}, "dram.capacity", "more than any machine"),
        ({"dram": "9EiB"}, "dram.capacity", "more than any machine"),
        ({"dram.verify": "perhaps"}, "dram.verify", "not true or false"),
        ({"dram.verify": 1}, "dram.verify", "not true or false"),
        ({"dram.huge_pages": "sometimes"}, "dram.huge_pages", "auto, always, never"),
        ({"dram.huge_pages": ["auto"]}, "dram.huge_pages", "auto, always, never"),
        ({"block_tokens": 0}, "block_tokens", "between 1"),
        ({"block_tokens": 16.0}, "block_tokens", "whole number"),
        ({"block_tokens": True}, "block_tokens", "whole number"),
        ({"block_tokens": "many"}, "block_tokens", "whole number"),
        ({"block_tokens": None}, "block_tokens", "whole number"),
        ({"writeback.dirty_limit": 0}, "writeback.dirty_limit", "0 to 1"),
        ({"writeback.dirty_limit": 1.1}, "writeback.dirty_limit", "0 to 1"),
        ({"writeback.dirty_limit": "nan"}, "writeback.dirty_limit", "not a number"),
        ({"writeback.dirty_limit": []}, "writeback.dirty_limit", "not a number"),
        ({"writeback.staging": 0}, "writeback.staging", "at least"),
        ({"writeback.put_timeout": "soon"}, "writeback.put_timeout", "250ms"),
        ({"writeback.put_timeout": -1}, "writeback.put_timeout", "250ms"),
        ({"tenants.a.secret_hex": "xyz"}, "tenants.a.secret_hex", "hexadecimal"),
        ({"tenants.a": {"secret_hex": "00", "secret_file": "/f"}}, "tenants.a", "both"),
        ({"tenants.a.secret_file": 3}, "tenants.a.secret_file", "not text"),
        ({"plugin": "tape"}, "plugin", "needs a table with name and capacity"),
        ({"plugin": {"name": "", "capacity": "1GiB"}}, "plugin.name", "empty"),
        ({"plugin": {"name": "tape", "capacity": 1}}, "plugin.capacity", "at least"),
        ({"plugin": {"name": "t", "capacity": "1GiB", "options": 3}}, "plugin.options", "values"),
    ],
    ids=repr,
)
def test_mistakes_are_named(overrides: Mapping[str, Any], path: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(overrides=overrides)
    assert caught.value.path == path
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("change", "path", "says"),
    [
        ({"capacity": 0}, "ssd.capacity", "at least"),
        ({"capacity": "1MiB"}, "ssd.capacity", "less than 3 segments"),
        ({"capacity": "3MiB", "path": ["/a", "/b"]}, "ssd.capacity", "less than 3 segments"),
        ({"capacity": 1 << 64}, "ssd.capacity", "more than any machine"),
        ({"segment": "11GiB"}, "ssd.capacity", "less than 3 segments"),
        ({"segment": "4KiB"}, "ssd.segment", "at least 64KiB"),
        ({"segment": 1_000_000}, "ssd.segment", "multiple of 4096"),
        ({"path": []}, "ssd.path", "at least one"),
        ({"path": ["/a", "/a"]}, "ssd.path", "twice"),
        ({"path": ""}, "ssd.path", "not a path"),
        ({"path": 3}, "ssd.path", "not text"),
        ({"path": "[/a"}, "ssd.path", "TOML"),
        ({"io_depth": 0}, "ssd.io_depth", "between 1 and 4096"),
        ({"read_timeout": 0}, "ssd.read_timeout", "more than zero"),
        ({"retry_max": "1ms"}, "ssd.retry_max", "retry_initial"),
        ({"fsync": "often"}, "ssd.fsync", "never, flush, always"),
    ],
    ids=repr,
)
def test_ssd_mistakes_are_named(change: dict[str, Any], path: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ssd(**change)
    assert caught.value.path == path
    assert says in str(caught.value)


def test_a_plug_in_has_options_of_its_own() -> None:
    tape = {"name": "tape", "capacity": "1GiB", "options": {"reel": "first", "two words": "x"}}
    config = load(overrides={"plugin": tape})
    assert config.plugin is not None and config.plugin.options["two words"] == "x"
    assert config.lower_tiers == (config.plugin,)
    text = to_toml(config)
    assert 'options = { reel = "first", "two words" = "x" }' in text
    assert load(overrides=tomllib.loads(text)) == config


def test_close_names_are_suggested() -> None:
    with pytest.raises(ConfigError) as caught:
        ssd(capcity="1GiB")
    assert caught.value.hint == "did you mean ssd.capacity?"


@pytest.mark.parametrize(
    ("capacity", "paths", "segment"),
    [
        ("100GiB", 1, 256 * MIB),
        ("4GiB", 1, 256 * MIB),
        ("4GiB", 2, 128 * MIB),
        ("1000MiB", 1, 62 * MIB),
        ("16MiB", 1, MIB),
        ("3MiB", 1, MIB),
        ("1TiB", 1, 256 * MIB),
        ("4TiB", 1, 1024 * MIB),
        ("30TiB", 2, 3840 * MIB),
    ],
)
def test_automatic_segments(capacity: str, paths: int, segment: int) -> None:
    config = ssd(capacity=capacity, path=[f"/{number}" for number in range(paths)])
    assert config.segment_bytes == segment
    assert ssd(segment="128KiB").segment_bytes == 128 * KIB


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    broken = tmp_path / "broken.toml"
    broken.write_text('block_tokens = 64\n[dram\ncapacity = "1GiB"\n')
    with pytest.raises(ConfigError, match=r"not valid TOML.*line 2") as caught:
        load(broken)
    assert caught.value.path == str(broken)
    with pytest.raises(ConfigError, match="No such file"):
        load(tmp_path / "absent.toml")
    with pytest.raises(ConfigError, match="directory"):
        load(tmp_path)
    broken.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="UTF-8"):
        load(broken)


def test_secrets(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    tenant = TenantConfig(secret_file=file)
    with pytest.raises(ConfigError, match="cannot be read"):
        tenant.secret()
    file.write_bytes(b"\n")
    with pytest.raises(ConfigError, match="empty"):
        tenant.secret()
    file.write_bytes(b" s3cret \x00\r\n")
    assert tenant.secret() == b" s3cret \x00"
    assert TenantConfig().secret() == b""


def test_secrets_are_never_shown() -> None:
    config = load(overrides={"tenants": {"a": {"secret_hex": "c0ffee"}}})
    for text in (repr(config), json.dumps(show(config)), to_toml(config)):
        assert "c0ffee" not in text
    mistakes: list[Any] = [
        {"tenants": {"a": "c0ffee"}},
        {"tenants": "c0ffee"},
        {"tenants": {"a": {"secret_hex": "c0ffeeX"}}},
        {"tenants": {"a": {"secret_hex": ["c0ffee"]}}},
        {"tenants.a": "{secret_hex = c0ffee}"},
    ]
    for mistake in mistakes:
        with pytest.raises(ConfigError) as caught:
            load(overrides=mistake)
        assert "c0ffee" not in str(caught.value) + caught.value.hint


def test_show_is_what_a_person_would_write() -> None:
    ssd = {**SSD, "retry_initial": 0.2}
    config = load(overrides={"ssd": ssd, "tenants.a.secret_hex": "00"})
    told = json.loads(json.dumps(show(config)))
    assert told["dram"]["capacity"] == "1GiB"
    assert told["ssd"]["path"] == ["/data"]
    assert told["ssd"]["retry_initial"] == "200ms"
    assert "retry_max" not in told["ssd"], "a developer option with its default"
    assert told["tenants"] == {"a": {"secret_file": None, "secret_hex": "***"}}
    assert show(Config())["ssd"] is None


def test_toml_is_commented_with_the_fields_documentation() -> None:
    text = to_toml(Config())
    assert '# Memory for blocks.\ncapacity = "1GiB"\n' in text
    assert "# [ssd]\n" in text
    assert "# [tenants.NAME]\n" in text
    assert all(len(line) <= 100 for line in text.splitlines())
    set_keys = [line for line in text.splitlines() if " = " in line and not line.startswith("#")]
    documented = [line.split(" = ")[0] for line in set_keys]
    classes = (DramConfig, WritebackConfig, SessionsConfig)
    tables = [
        name for one in classes for name in one.__slots__ if name not in developer_options(one)
    ]
    unset = ("prefill_tokens_per_s", "gpu_watts")
    ledger = [name for name in LedgerConfig.__slots__ if name not in unset]
    assert documented == ["block_tokens", *tables, *ledger]


configs = st.builds(
    Config,
    block_tokens=st.integers(1, 1 << 20),
    dram=st.builds(
        DramConfig,
        capacity=st.integers(4096, (1 << 63) - 1),
        huge_pages=st.sampled_from(["auto", "always", "never"]),
        lock=st.booleans(),
    ),
    ssd=st.none()
    | st.builds(
        SsdConfig,
        path=st.lists(
            st.text(min_size=1).filter(lambda text: "\0" not in text).map(lambda t: Path("/" + t)),
            min_size=1,
            max_size=3,
            unique=True,
        ).map(tuple),
        capacity=st.integers(GIB, 1 << 60),
        read_timeout=st.floats(1e-9, 1e9),
        io_depth=st.integers(1, 4096),
    ),
    plugin=st.none()
    | st.builds(
        PluginConfig,
        name=st.text(min_size=1),
        capacity=st.integers(GIB, 1 << 60),
        options=st.dictionaries(st.text(max_size=5), st.text(max_size=5)),
    ),
    writeback=st.builds(WritebackConfig, dirty_limit=st.floats(0, 1, exclude_min=True)),
    tenants=st.dictionaries(
        st.text(min_size=1, max_size=5), st.builds(TenantConfig, secret_file=st.just(Path("/s")))
    ),
)


@given(configs)
def test_toml_and_show_load_back(config: Config) -> None:
    assert load(overrides=tomllib.loads(to_toml(config))) == config
    assert load(overrides=json.loads(json.dumps(show(config)))) == config


def test_a_tier_has_as_many_drives_as_a_location_can_name() -> None:
    paths = [f"/mnt/{number}" for number in range(VOLUMES_MAX + 1)]
    settings = {"path": paths[:-1], "capacity": "1PiB"}
    assert len(load(overrides={"hdd": settings}).file_tiers[0].path) == VOLUMES_MAX
    with pytest.raises(ConfigError, match="32769 paths are too many") as raised:
        load(overrides={"hdd": {**settings, "path": paths}})
    assert raised.value.hint


def test_variables_of_a_kubernetes_service_are_not_settings() -> None:
    made = {
        "KVDEPOT_PORT": "tcp://10.96.0.7:9400",
        "KVDEPOT_PORT_9400_TCP": "tcp://10.96.0.7:9400",
        "KVDEPOT_PORT_9400_TCP_PROTO": "tcp",
        "KVDEPOT_PORT_9400_TCP_PORT": "9400",
        "KVDEPOT_PORT_9400_TCP_ADDR": "10.96.0.7",
        "KVDEPOT_SERVICE_HOST": "10.96.0.7",
        "KVDEPOT_SERVICE_PORT": "9400",
        "KVDEPOT_SERVICE_PORT_METRICS": "9400",
        "KVDEPOT_METRICS_SERVICE_HOST": "fd00::7",
        "KVDEPOT_METRICS_PORT": "udp://10.96.0.7:9400",
    }
    assert load(env=made) == load()
    assert load(env={**made, "KVDEPOT_BLOCK_TOKENS": "64"}).block_tokens == 64


@pytest.mark.parametrize(("name", "says"), REMOVED_SETTINGS.items())
def test_a_removed_setting_is_named_with_what_replaces_it(
    tmp_path: Path, name: str, says: str
) -> None:
    section, _, key = name.rpartition(".")
    file = tmp_path / "c.toml"
    file.write_text(f"[{section}]\n{key} = 1\n" if section else f"{key} = 1\n")
    variable = "KVDEPOT_" + name.replace(".", "__").upper()
    sources: list[dict[str, Any]] = [
        {"path": file},
        {"env": {variable: "1"}},
        {"overrides": {name: 1}},
    ]
    assert says.startswith("removed in ")
    for source in sources:
        with pytest.raises(ConfigError) as raised:
            load(**source)
        assert (raised.value.path, str(raised.value)) == (name, f"{name}: {says}")


@pytest.mark.parametrize("name", ["KVDEPOT_PORT", "KVDEPOT_SERVICE_HOST", "KVDEPOT_DRAM__PORT"])
def test_a_wrong_variable_is_still_told(name: str) -> None:
    with pytest.raises(ConfigError, match="unknown key"):
        load(env={name: "yes please"})


def test_variables_of_other_commands_are_not_settings() -> None:
    other = {"KVDEPOT_PLAN_MODEL": "m", "KVDEPOT_PARTS_YEARS": "3", "KVDEPOT_SOCKET": "/run/s"}
    other["KVDEPOT_DAEMON_USER"] = "kvdepot"
    assert load(env=other) == load()


def test_there_are_at_most_60_settings() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "configuration.md").read_text()
    settings, _ = page.split("## Developer options")
    assert 0 < sum(line.startswith("| `") for line in settings.splitlines()) <= 60
