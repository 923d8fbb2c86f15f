"""What commands answer to mistakes: status 2, one error that names what is wrong, no answer."""

import json
from pathlib import Path

import pytest

from kvdepot.cli.main import main

PLAN = ["plan", "dell-80"]
SIZE = ["size", "--model", "llama-3-8b"]
TRACE = ["sim", "--trace", "TRACE"]
HITS = [*TRACE, "--hits-only"]
USERS = ["sim", "--workload", "multi-turn"]
HINT = ["hint", "--set", "nats.servers=nats://127.0.0.1:1"]
PROXY = ["proxy", "llama-server", "--upstream", "http://127.0.0.1:1", "--listen", "127.0.0.1:0"]
MEMORY = ["--set", "dram.capacity=16MiB", "--set", "dram.prefault=false"]
MISTAKES = [
    (["docter"], "hint: kvdepot --help"),
    (["doctor", "--jsn"], "unrecognized arguments: --jsn"),
    (["--nothing"], "unrecognized arguments: --nothing"),
    (["config"], "hint: kvdepot config --help"),
    (["config", "show", "--config", "nowhere.toml"], "nowhere.toml"),
    (["config", "show", "--set", "dram.capacity"], "hint: write --set"),
    (["doctor", "--quick", "--measure"], "hint: add --config"),
    (["bench", "io", "--block", "1000"], "error: argument --block"),
    (["bench", "io", "--block", "huge"], "error: argument --block"),
    (["bench", "io", "--size", "1KiB"], "error: argument --size"),
    (["bench", "io", "--rounds", "0"], "error: argument --rounds"),
    (["bench", "object"], "--url"),
    (["torture", "--only", "kills,floods"], "invalid kinds 'kills,floods' (expected some of"),
    ([*PROXY, "--slots", "S", "--socket", "x", "--set", "a.b=c"], "--socket: has no effect with"),
    ([*PROXY, "--slots", "S", "--listen", "here"], "is not HOST:PORT"),
    (PROXY, "--slots"),
    (
        [*PROXY, "--slots", "S", "--upstream", "ftp://x", *MEMORY],
        "invalid address of a llama-server",
    ),
    ([*PLAN[:1], "nowhere"], "error: scenario:"),
    (["plan"], "error: model:"),
    (["plan", "workstation", "--parts", "/nowhere/parts.toml"], "/nowhere/parts.toml"),
    ([*PLAN, "--set", "traffic.users=-1"], "error: traffic.users:"),
    ([*PLAN, "--set", "fleet.tp=3"], "error: fleet.tp:"),
    ([*PLAN, "--set", "fleet.tp=1"], "error: fleet.tp:"),
    ([*PLAN, "--set", "fleet.gpu=abacus"], "error: gpu:"),
    ([*PLAN, "--set", "model=lama"], "error: model:"),
    ([*PLAN, "--set", "traffic.return_share=2"], "error: traffic.return_share:"),
    ([*PLAN, "--set", "traffic.return_gap=0"], "error: traffic.return_gap:"),
    ([*PLAN, "--set", "goal.ttft_p95=0"], "error: goal.ttft_p95:"),
    ([*PLAN, "--set", "traffic.uesrs=3"], "error: traffic.uesrs:"),
    ([*PLAN, "--set", "goal.ttft_p95"], "hint: write --set goal.ttft_p95=2s"),
    ([*PLAN, "--set", "goal=5"], "or set goal.ttft_p95"),
    ([*PLAN, "--set", "fleet.gpus_per_node=9", "--set", "fleet.tp=3"], "error: tp: 8 kv heads"),
    ([*PLAN, "--show", "--report", "x.html"], "--report: has no effect with --show"),
    (["plan", "--set", "goal.retention=1d"], "hint: start from a scenario"),
    (["plan", "--print-parts", "--set", "a=3"], "--set: has no effect with --print-parts"),
    ([*SIZE, "--context", "-4"], "error: argument --context"),
    ([*SIZE, "--users", "0"], "error: argument --users"),
    ([*SIZE, "--tokens-per-second", "-1"], "error: argument --tokens-per-second"),
    ([*SIZE, "--tokens-per-second", "nan"], "error: argument --tokens-per-second"),
    ([*SIZE, "--tp", "1.5"], "error: argument --tp"),
    ([*SIZE, "--block-tokens", "many"], "error: argument --block-tokens"),
    ([*SIZE, "--dtype", "float7"], "error: argument --dtype"),
    ([*SIZE, "--tier", "ssd=much"], "error: --tier"),
    ([*SIZE, "--tier", "ssd=0"], "error: ssd"),
    ([*SIZE, "--codec", "zip"], "error: codec"),
    ([*SIZE, "--codec", "0.5"], "error: codec"),
    ([*SIZE, "--tp", "3"], "error: tp"),
    (["size"], "error: --model: is missing"),
    (["size", "--models", "--tp", "2"], "--tp: has no effect with --models"),
    (["size", "--model", "llama-3-71b"], "nearest: llama-3-70b"),
    (["size", "--model", "none.json"], "none.json"),
    (["size", "--model", "BAD"], "bad.json"),
    (["sim", "--trace", "nowhere", "--hits-only", "--capacity", "dram=1Mtok"], "does not exist"),
    (HITS, "--capacity"),
    ([*HITS, "--capacity", "dram=3GB"], "not a number of tokens"),
    ([*HITS, "--capacity", "tape=3Mtok"], "'tape' is not a tier"),
    ([*HITS, "--capacity", "dram=1tok"], "less than a block"),
    ([*HITS, "--capacity", "dram=0Mtok"], "'0Mtok' is less than one token"),
    ([*HITS, "--capacity", "dram=1Mtok,dram=2Mtok"], "twice"),
    ([*HITS, "--capacity", "dram=1Mtok,ssd=2Mtok", "--policy", "optimal"], "one tier"),
    ([*HITS, "--capacity", "dram=1Mtok", "--merge", "2"], "session traces"),
    ([*HITS, "--set", "a=b"], "--set: has no effect with --hits-only"),
    ([*HITS, "--tiers", "dram=1TB"], "--tiers: has no effect with"),
    ([*TRACE, "--session-gap", "soon"], "error: argument --session-gap"),
    ([*TRACE, "--tiers", "tape=3"], "not in the parts list"),
    ([*TRACE, "--tiers", "ssd=1,ssd=2"], "twice"),
    ([*TRACE, "--tiers", "ssd=many"], "neither a size nor"),
    ([*TRACE, "--tiers", "ssd=0"], "'0' is not a number of units"),
    ([*TRACE, "--model", "no-such-model"], "no-such-model"),
    ([*TRACE, "--policy", "optimal"], "one real policy"),
    ([*TRACE, "--set", "fleet.gpu=abacus"], "not in the parts list"),
    ([*TRACE, "--set", "fleet.prefill={step_s = 1}"], "fleet.prefill.token_s: missing"),
    ([*TRACE, "--set", "fleet.write_backlog=nan"], "fleet.write_backlog"),
    ([*TRACE, "--set", "fleet.nodes=0"], "fleet.nodes: must be more than 0"),
    ([*TRACE, "--set", "fleet.route=west"], "not one of prefix, random"),
    ([*TRACE, "--set", "fleet.speed=2"], "fleet.speed: unknown key"),
    ([*TRACE, "--set", "traffic.turns=3"], "--set traffic: has no effect with --trace"),
    ([*TRACE, "--capacity", "dram=1Mtok"], "--capacity: has no effect without --hits"),
    ([*TRACE, "--users", "3"], "--users: has no effect without --workload"),
    ([*USERS, "--merge", "2"], "--merge: has no effect without --trace"),
    ([*USERS, "--no-baseline"], "--no-baseline: has no effect without --tiers"),
    ([*USERS, "--qps", "nan"], "argument --qps: 'nan' is not above 0"),
    ([*USERS, "--qps", "inf"], "argument --qps: 'inf' is not above 0"),
    ([*USERS, "--turns", "0"], "argument --turns: '0' is not above 0"),
    ([*USERS, "--set", "traffic.qps=0"], "traffic.qps: must be more than 0"),
    ([*USERS, "--set", "traffic.users=0"], "traffic.users: must be more than 0"),
    ([*USERS, "--set", "fleet.tp=3"], "error: tp: 8 kv heads do not divide by 3\nhint: 1, 2, 4"),
    (["sim", "--nodes", "2"], "needs requests"),
    (["hint", "--session", "a"], "nats.servers: is not set"),
    (HINT, "needs a prompt"),
    ([*HINT, "--session", "a"], "no server can be used"),
    ([*HINT, "--session", "a\n"], "session is not text"),
    ([*HINT, "--session", "a", "--model", "m"], "--model: has no effect without --tokens"),
    ([*HINT, "--tokens", "LIST", "--tenant", "m"], "--tenant: has no effect without --session"),
    ([*HINT, "--tokens", "TEXTS"], "is not a whole number"),
    ([*HINT, "--tokens", "/no/such"], "No such file"),
    ([*HINT, "--session", "a", "--within", "2h"], "seconds from now"),
]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Paths, by the word that stands for them."""
    monkeypatch.chdir(tmp_path)
    request = {"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [1]}
    texts = {
        "TRACE": f"{json.dumps(request)}\n" * 2,
        "LIST": "[1, 2]",
        "TEXTS": '["a"]',
        "BAD": "{",
    }
    paths = {name: tmp_path / f"{name.lower()}.json" for name in texts}
    for name, text in texts.items():
        paths[name].write_text(text)
    return {name: str(path) for name, path in paths.items()}


@pytest.mark.parametrize(
    ("words", "message"), MISTAKES, ids=[" ".join(words).strip() for words, _ in MISTAKES]
)
def test_a_mistake_is_one_error(
    words: list[str], message: str, files: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    if words[0] == "hint" and "--session" in words[1:]:
        pytest.importorskip("nats", reason="the extra nats is not installed")
    assert main([files.get(word, word) for word in words]) == 2
    seen = capsys.readouterr()
    assert seen.err.startswith("error: ") and message in seen.err, seen.err
    assert seen.out == "" and "Traceback" not in seen.err
