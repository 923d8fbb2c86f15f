"""The page of engines: `python tests/adapters/engines_page.py --run transformers sglang --write`.

Runs the tests of engines, each as its users' guide has it, keeps what they answered in RESULTS, and
makes docs/engines.md of that. `--add NAME FILE` takes what such a run has printed with --json (or
pytest's --junitxml), and names the parts that were run where these were not all:
`--add vllm FILE restarts audit`. Without either the page is made of what is there.
"""

import argparse
import datetime
import importlib.metadata
import json
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.e2e.vllm_environments import NEWEST

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "engines.md"
RESULTS = ROOT / "benchmarks" / "results" / "engines.json"
MODELS = ROOT / "benchmarks" / "results" / "vllm-models.json"
HEAD = """# Engines

Made by `python tests/adapters/engines_page.py --write` from what the tests of each engine answered
when they ran last. A model, dtype or feature is named where tests of it ran and all of them passed;
those with a test that failed are named under *not right*. What is not named was not tested.

| engine | version | run | tests passed | models | dtypes | features |
|---|---|---|---|---|---|---|
"""
Points = dict[str, bool]


@dataclass(frozen=True)
class EngineUnderTest:
    """What is run, and which of its points stand for what: names and patterns of points."""

    title: str
    guide: str
    command: str
    models: Mapping[str, str] = field(default_factory=dict)
    dtypes: Mapping[str, str] = field(default_factory=dict)
    features: Mapping[str, str] = field(default_factory=dict)


ENGINES = {
    "transformers": EngineUnderTest(
        "transformers",
        "transformers.md",
        "-m pytest -q tests/adapters/hf",
        {
            "full attention (Llama)": r"\bllama",
            "windows (Mistral)": r"\bmistral",
            "windows and full (Gemma 3)": r"\bgemma3",
            "sinks and experts (GPT-OSS)": r"\bgpt_oss",
            "latent attention (DeepSeek)": r"\bdeepseek",
            "learned positions (GPT-2)": r"\bgpt2",
        },
        {"float32": "same_answers", "bfloat16": "bfloat16", "float16": "float16"},
        {
            "batches": "batch",
            "disk, restarts": "restart|disk",
            "damage is recomputed": "flipped|corrupt|damage",
            "audit": "test_audit",
        },
    ),
    "vllm": EngineUnderTest(
        "vLLM, connector",
        "guides/vllm.md",
        "tests/e2e/vllm_connector.py --json",
        {},
        {},
        {
            "memory and disk, kill -9": "kill -9|killed",
            "LoRA": "(?i)lora",
            "cache salts": "salt",
            "preemption": "preempt",
            "several processes": "(?i)tensor|server",
            "garbage shows": "garbage",
            "audit": "^audit",
        },
    ),
    "tiers": EngineUnderTest(
        "vLLM, below its CPU tier",
        "guides/vllm-tiers.md",
        "tests/e2e/vllm_tiers.py --json contract restarts",
        {},
        {},
        {
            "contract of vLLM's own tier manager": "^contract",
            "capacity, eviction": "capacity",
            "restart": "restart",
            "checksums": "damaged",
            "other numbers of workers": "other workers",
            "slow drives": "slow drive",
            "kill -9": "kill -9",
            "0.8 of the time from its own fs tier": "by the fs tier",
        },
    ),
    "sglang": EngineUnderTest(
        "SGLang, HiCache",
        "guides/sglang.md",
        "tests/e2e/sglang_engine.py --json",
        {"MHA": r"(?i)\bmha", "MLA": r"(?i)\bmla"},
        {},
        {
            "generic": "generic",
            "v1": r"\bv1",
            "v2": r"\bv2",
            "failures": "(?i)fail|random",
            "attach and detach": "attach",
            "`buffer_only`": "buffer only",
            "ranks": "ranks",
            "a whole engine, killed": "^engine",
            "linker": "(?i)link",
            "audit": "^audit",
        },
    ),
    "llama": EngineUnderTest(
        "llama.cpp, proxy",
        "guides/llama-cpp.md",
        "tests/e2e/llama_proxy.py --json",
        {"SmolLM2": "cold"},
        {"f16": r"\bf16", "q8_0": "q8_0", "q4_0": "q4_0"},
        {
            "restarts of both": "restarts of both",
            "20 conversations over 4 slots": "20 conversations",
            "server killed at random": "killed at random",
            "shared prefixes once": "shared prefixes",
            "first token from memory and disk": "first token",
            "nothing added to a miss": "without a hit",
            "audit": "^audit",
        },
    ),
}


def points_of(found: Any, name: str = "") -> Iterator[tuple[str, bool]]:
    """All points in what a run answered, however they are arranged, but for those not run."""
    if isinstance(found, list):
        for one in found:
            yield from points_of(one, str(one.get("point", name)))
    elif isinstance(found, Mapping):
        inner = found.get("checks") or found.get("points")
        if inner is not None:
            yield from points_of(inner, name)
        elif isinstance(found.get("ok"), bool):
            yield name, found["ok"]
        else:
            for key, one in found.items():
                if isinstance(one, Mapping | list):
                    yield from points_of(one, key)


def read(text: str) -> Points:
    """What a run has printed: pytest's XML, or objects, a line each, the last with all of them."""
    if text.lstrip().startswith("<?xml"):
        cases = ElementTree.fromstring(text).iter("testcase")
        ran = [case for case in cases if case.find("skipped") is None]
        return {
            f"{case.get('classname')}::{case.get('name')}": not any(
                case.find(bad) is not None for bad in ("failure", "error")
            )
            for case in ran
        }
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    whole = lines[-1] if lines and "points" in lines[-1] else lines
    return dict(points_of(whole))


def version_of(name: str) -> str:
    if name in ("vllm", "tiers"):
        return NEWEST
    if name == "sglang":
        text = (ROOT / "tests" / "adapters" / "sglang" / "e2e.py").read_text()
        return str(re.findall(r'"sglang==([\d.]+)"', text)[0])
    return importlib.metadata.version({"llama": "xllamacpp"}.get(name, name))


def kept(name: str, points: Points, parts: Sequence[str] = ()) -> dict[str, Any]:
    """`parts`: those that were run; none: as the command has it."""
    return {
        "parts": " ".join(parts),
        "version": version_of(name),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "points": points,
    }


def run(name: str) -> Points:
    """Run an engine's tests here."""
    words = [sys.executable, *ENGINES[name].command.split()]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        if "pytest" in words:
            subprocess.run([*words, f"--junitxml={out}"], cwd=ROOT, check=False)
        else:
            with out.open("w") as target:
                subprocess.run(words, cwd=ROOT, check=False, stdout=target)
        return read(out.read_text())


def seen(points: Points, patterns: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Names whose tests all passed, and names with one that did not."""
    good: list[str] = []
    bad: list[str] = []
    for name, pattern in patterns.items():
        found = [ok for point, ok in points.items() if re.search(pattern, point)]
        if found:
            (good if all(found) else bad).append(name)
    return good, bad


def row(engine: EngineUnderTest, result: Mapping[str, Any] | None, served: int) -> str:
    link = f"[{engine.title}]({engine.guide})"
    if result is None:
        return f"| {link} | – | not run | – | – | – | – |\n"
    points: Points = result["points"]
    cells, wrong = [], []
    for patterns in (engine.models, engine.dtypes, engine.features):
        good, bad = seen(points, patterns)
        cells.append(", ".join(good))
        wrong += bad
    if engine is ENGINES["vllm"] and served:
        cells[0] = f"{served} architectures ([models](models.md))"
    if wrong:
        cells[2] = "; ".join(filter(None, [cells[2], f"*not right*: {', '.join(wrong)}"]))
    passed = f"{sum(points.values()):,} of {len(points):,}"
    told = " | ".join(cell or "–" for cell in cells)
    return f"| {link} | {result['version']} | {result['date']} | {passed} | {told} |\n"


def page(results: Mapping[str, Any], served: int) -> str:
    """The page as Markdown."""
    text = HEAD + "".join(
        row(engine, results.get(name), served) for name, engine in ENGINES.items()
    )
    failed = {
        name: [point for point, ok in result["points"].items() if not ok]
        for name, result in results.items()
    }
    if any(failed.values()):
        text += "\n## Points that failed\n\n"
        for name, points in failed.items():
            text += "".join(f"- {ENGINES[name].title}: {point}\n" for point in points)
    text += "\n## What was run\n\n"
    for name, one in ENGINES.items():
        parts = results.get(name, {}).get("parts", "")
        text += f"- {one.title}: `{' '.join(['python', one.command, *parts.split()])}`\n"
    return text


def served_models() -> int:
    rows = json.loads(MODELS.read_text())["rows"].values()
    return sum(one["outcome"] == "served" for one in rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--run", nargs="+", choices=sorted(ENGINES), default=[])
    parser.add_argument(
        "--add", nargs="+", action="append", default=[], help="NAME FILE [PART ...]"
    )
    parser.add_argument("--write", action="store_true", help="the page, else it is printed")
    args = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for given in args.add:
        if len(given) < 2 or given[0] not in ENGINES:
            parser.error(f"--add takes one of {', '.join(ENGINES)} and a file, got {given}")
        name, file, *parts = given
        results[name] = kept(name, read(Path(file).read_text()), parts)
    for name in args.run:
        results[name] = kept(name, run(name))
    if args.add or args.run:
        RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    text = page(results, served_models())
    if args.write:
        PAGE.write_text(text)
    else:
        print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
