"""The parts list and scenarios: what is shipped loads, and mistakes are named."""

from dataclasses import replace
from pathlib import Path

import pytest

from kvdepot.cli.main import main
from kvdepot.errors import ConfigError
from kvdepot.planner.outcome import Servers, UsedTier, cost_of
from kvdepot.planner.parts import load_parts, shipped_parts
from kvdepot.planner.scenario import load_scenario, scenario_names
from kvdepot.planner.simulation import Machines, fleet_of, parse_tiers

Seen = pytest.CaptureFixture[str]


def edited(tmp_path: Path, old: str, new: str) -> Path:
    text = shipped_parts()
    assert old in text
    path = tmp_path / "parts.toml"
    path.write_text(text.replace(old, new, 1))
    return path


def test_prices_are_those_of_the_papers() -> None:
    """Hybrid storage paper, lines 21 and 24: 8.50 USD/GB; 44 times, then 16 times less."""
    tiers = load_parts().tiers
    per_tb = {name: device.price / (device.unit / 1e12) for name, device in tiers.items()}
    assert per_tb["dram"] == pytest.approx(8_500)
    assert per_tb["dram"] / per_tb["ssd"] == pytest.approx(44, rel=0.005)
    assert per_tb["ssd"] / per_tb["hdd"] == pytest.approx(16, rel=0.005)


def test_every_number_has_a_source_beside_it() -> None:
    for line in shipped_parts().splitlines():
        number = line.partition("=")[2].strip()
        named = line.split(" ", 1)[0] in ("counts", "source", "remote", "currency")
        if number and not line.startswith("#") and not named and line.strip() != "price = 0":
            previous = "memory", "power_w = 0", "unit"
            assert "#" in line or line.startswith(previous), line


def test_the_fastest_tier_is_first() -> None:
    latencies = [device.latency + device.seek for device in load_parts().tiers.values()]
    assert latencies == sorted(latencies)


@pytest.mark.parametrize(
    ("old", "new", "name"),
    [
        ('unit = "64GB"', 'unit = "-64GB"', "tiers.dram.unit"),
        ("price = 544", "price = -1", "tiers.dram.price"),
        ("price = 544", "prize = 544", "tiers.dram.prize"),
        ("efficiency = 0.58", "efficiency = 1.58", "gpus.h100-pcie.efficiency"),
        ('read = "275MB"', "read = 0", "tiers.hdd.read"),
        ("counts = [0, 4, 8, 16]", "counts = [0, -4]", "tiers.cxl.counts"),
        ("counts = [0, 4, 8, 16]", "counts = []", "tiers.cxl.counts"),
        ('latency = "140ns"', 'latency = "soon"', "tiers.dram.latency"),
        ("years = 4 ", "years = 0 ", "years"),
        ("pue = 1.3", "", "pue"),
        ('currency = "USD"', "currency = [", "parts.toml"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, old: str, new: str, name: str, capsys: Seen) -> None:
    path = edited(tmp_path, old, new)
    with pytest.raises(ConfigError) as raised:
        load_parts(path)
    assert name in raised.value.path
    assert main(["plan", "workstation", "--parts", str(path)]) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_scenarios_that_are_shipped_load() -> None:
    for name in scenario_names():
        scenario = load_scenario(name)
        assert load_parts().gpu(scenario.fleet.gpu).memory > 0
        assert scenario.traffic.turn_gap_s > 0


def test_the_paper_and_the_slide_are_in_the_scenarios() -> None:
    """Seed 000 line 82: ISL 21K, OSL 100, 15 users, QPS 1, 10 turns; 003 line 136: 80 users, TP=4,
    10 rounds, 20K, 100."""
    paper, slide = load_scenario("workstation").traffic, load_scenario("dell-80").traffic
    assert (paper.context_tokens(1), paper.answer_tokens, paper.users) == (21_000, 100, 15)
    assert (paper.requests_per_s, paper.turns) == (1, 10)
    assert (slide.context_tokens(1), slide.answer_tokens, slide.users) == (20_000, 100, 80)
    assert load_scenario("dell-80").fleet.tp == 4


def test_a_scenario_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        'model = "qwen3-8b"\n[traffic]\nrequests_per_s = 2\nusers = 10\nquestion_tokens = 50\n'
        'answer_tokens = 50\n[goal]\nttft_p95 = "1s"\n'
    )
    scenario = load_scenario(str(path), overrides={"traffic.users": "20"})
    assert scenario.traffic.turn_gap_s == 10.0
    assert scenario.goal.retention == 0.0


def test_a_config_file_needs_its_parameters(tmp_path: Path, capsys: Seen) -> None:
    path = tmp_path / "config.json"
    path.write_text(
        '{"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4,'
        ' "hidden_size": 256, "dtype": "bfloat16"}'
    )
    assert main(["plan", "workstation", "--set", f"model={path}"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: parameters:")
    assert "--set parameters=" in told


def test_requests_and_traffic_of_object_storage_cost() -> None:
    base = load_parts().tiers["object"]
    cents = replace(
        base, price_per_million_reads=0.4, price_per_million_writes=5.0, price_per_tb_read=90.0,
        request=1_000_000,
    )  # fmt: skip
    # A terabyte is a million such requests.
    assert cents.traffic_price(1e12, 0.0) == pytest.approx(90.4)
    assert cents.traffic_price(0.0, 2e12) == pytest.approx(10.0)
    assert load_parts().tiers["ssd"].traffic_price(1e15, 1e15) == 0.0


def test_traffic_is_in_the_cost() -> None:
    parts = load_parts()
    servers = Servers(parts.gpu("h100"), 8, 2, 100.0)
    device = replace(parts.tiers["object"], price_per_tb_read=90.0, price_per_million_reads=0.0)
    still, busy = (
        cost_of(parts, servers, [UsedTier(device, 1, None, nbytes)], 1e6).per_hour
        for nbytes in (0.0, 1e12)
    )
    assert busy - still == pytest.approx(2 * 90.0), "for each of the two nodes"


def test_a_mounted_folder_is_one_for_all_nodes(tmp_path: Path) -> None:
    parts = load_parts(edited(tmp_path, "[tiers.object]", "[tiers.shared]"))
    tiers = parse_tiers("dram=512GB,shared=20TB", parts)
    fleet = fleet_of(Machines(nodes=3, tiers=tiers), parts, 256)
    assert [(tier.name, tier.shared, tier.remote) for tier in fleet.tiers] == [
        ("dram", False, False),
        ("shared", True, True),
    ]
