"""kvdepot under SGLang, for real: `python tests/e2e/sglang_engine.py --json`.

Makes an environment with SGLang 0.5.23 in the cache folder when it is missing; torch and
transformers are those of the Python that runs this. `cache` drives SGLang's own cache controller,
radix tree and linker code (`real_sglang.py`); `engine` asks a whole SGLang with a small model
before and after its processes are killed (`real_sglang_engine.py`); `audit` has every hit of that
engine computed again, then plants a fault; `weights` updates its weights in place. With --device
cuda, and a Python that has SGLang and its kernels, `cache` has the linker's pools on the GPU, and
`engine` asks a larger model (`real_sglang_gpu.py`) and takes first-token times. The last line with
--json is `{"ok", "points"}`. Exit status 1 if a point fails.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.support.swapped_payloads import keys_in, swap_payloads

import kvdepot
from kvdepot.adapters.hf import smollm2

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvdepot"
SGLANG = "sglang==0.5.23"
ENGINE_LIMIT_S = 1200
NEAR = 1e-3
PAGE, TOKENS = 16, 400
"""As in real_sglang_engine.py."""
GPU_TOKENS = 16_384
"""As in real_sglang_gpu.py."""
DRAM: dict[str, Any] = {"capacity": "256MiB", "huge_pages": "never"}
DISK: dict[str, Any] = {"capacity": "1GiB", "segment": "16MiB"}
Seen = dict[str, dict[str, Any]]
Run = Callable[[Path, Path], Seen]


def python_with_sglang() -> Path:
    """An environment that looks into itself first, and then into this one's."""
    target = CACHE / "sglang"
    wanted = [*(HERE / "sglang_requirements.txt").read_text().split(), SGLANG]
    python, installed = target / "bin" / "python", target / "installed.txt"
    if not python.exists():
        print(f"making {target} with {SGLANG}, a minute or two and 1 GB", file=sys.stderr)
        making = CACHE / "sglang-in-work"
        venv = [sys.executable, "-m", "venv", "--without-pip", "--clear", str(making)]
        subprocess.run(venv, check=True)
        shared = next(path for path in sys.path if path.endswith("site-packages"))
        (own,) = making.glob("lib/python*/site-packages")
        (own / "shared.pth").write_text(f"import site; site.addsitedir({shared!r})\n")
        install(own, wanted)
        (making / "installed.txt").write_text("\n".join(wanted))
        making.rename(target)
    (own,) = target.glob("lib/python*/site-packages")
    there = set(installed.read_text().split()) if installed.exists() else found(own)
    if missing := [one for one in wanted if one not in there]:
        install(own, missing)
    installed.write_text("\n".join(wanted))
    return python


def found(folder: Path) -> set[str]:
    """The packages of a folder, as they are required."""
    names = (path.name.removesuffix(".dist-info") for path in folder.glob("*.dist-info"))
    return {"==".join(name.rsplit("-", 1)) for name in names}


def install(folder: Path, packages: list[str]) -> None:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-cache-dir", "--no-deps"]
    subprocess.run([*pip, "--target", str(folder), *packages], check=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(RUNS)}; all")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--python", type=Path, help="one that has SGLang")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    args = parser.parse_args()
    runs = RUNS if args.device == "cpu" else GPU_RUNS
    if args.device == "cuda" and not args.python:
        parser.error("--device cuda needs --python, one that has SGLang and its kernels")
    for part in args.parts:
        if part not in runs:
            parser.error(f"{part!r} is not one of {', '.join(runs)}")
    try:
        python = args.python or python_with_sglang()
    except subprocess.CalledProcessError as error:
        print(f"error: SGLang cannot be installed: {error}")
        print("hint: a package index must be reachable, or give --python, one that has SGLang")
        return 2
    started = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="kvdepot-sglang-"))
    try:
        seen: Seen = {}
        for part in args.parts or runs:
            seen.update(runs[part](python, folder))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    points = [{"point": name, "ok": not one["error"], **one} for name, one in seen.items()]
    for point in points:
        line = f"{'ok  ' if point['ok'] else 'FAIL'} {point['point']} {point['error']}"
        print(json.dumps(point) if args.json else line)
    ok = bool(points) and all(point["ok"] for point in points)
    seconds = round(time.monotonic() - started)
    whole = {"ok": ok, "seconds": seconds, "points": points}
    print(json.dumps(whole) if args.json else f"{'ok' if ok else 'FAILED'} after {seconds} s")
    return 0 if ok else 1


def run_cache(python: Path, folder: Path, device: str = "cpu") -> Seen:
    """What real_sglang.py has seen."""
    out = folder / "seen.json"
    where = ["--depot", str(folder), "--out", str(out), "--device", device]
    started(python, "real_sglang.py", where, folder)
    seen: Seen = json.loads(out.read_text())
    return seen


def engines(python: Path, folder: Path) -> Seen:
    """Two engines, one after the other, on one depot. SGLang ends its processes by killing them."""
    model = smollm2.prepare(CACHE / "models")
    began = time.monotonic()
    answers = []
    for number in range(2):
        out = folder / f"answers-{number}.json"
        where = ["--model", str(model), "--depot", str(folder / "engine"), "--out", str(out)]
        started(python, "real_sglang_engine.py", where, folder)
        answers.append(json.loads(out.read_text()))
    first, second = answers
    cached = {
        "computed": (first["long"], 0),
        "again": (first["again"], TOKENS // PAGE * PAGE - PAGE),
        "after a kill": (second["long"], TOKENS // PAGE * PAGE - PAGE),
        "shared beginning after a kill": (second["other"], 192),
    }
    seen: Seen = {}
    for name, (answer, at_least) in cached.items():
        model_of = first["other"] if "shared" in name else first["long"]
        seen[f"engine {name}"] = {"error": differs(answer, model_of, at_least), **answer}
    seen["engine after a kill"]["seconds"] = round(time.monotonic() - began, 1)
    return seen


def updated(python: Path, folder: Path) -> Seen:
    """Weights that are updated in place have pages of their own: every answer is that of an engine
    without a linker, and the pages of weights that return are hit."""
    model, other = smollm2.prepare(CACHE / "models"), folder / "other weights"
    larger_keys(model, other)
    answers: list[dict[str, Any]] = []
    for more in (["--plain"], []):
        out = folder / f"updated-{len(answers)}.json"
        where = ["--model", str(model), "--other", str(other), "--depot", str(folder / "updated")]
        started(python, "real_sglang_engine.py", [*where, "--out", str(out), *more], folder)
        answers.append(json.loads(out.read_text()))
    plain, linked = answers
    full = TOKENS // PAGE * PAGE - PAGE
    found: Seen = {}
    for name, answer in linked.items():
        at_least = 0 if name in ("first", "other") else full
        found[f"weights {name}"] = {"error": differs(answer, plain[name], at_least), **answer}
    return found


def larger_keys(model: Path, target: Path) -> None:
    """The model with larger keys and values."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, target)
    for path in target.glob("*.safetensors"):
        tensors = load_file(path)
        for name in tensors:
            if "k_proj" in name or "v_proj" in name:
                tensors[name] = tensors[name] * 1.3
        save_file(tensors, path, metadata={"format": "pt"})


def audited(python: Path, folder: Path) -> Seen:
    """An engine whose every hit is audited; then, on the same depot, pages in the wrong place."""
    disk = folder / "audited-engine"
    (wanted, *hits), known = audited_engine(python, folder, disk)
    short = TOKENS // PAGE * PAGE - 2 * PAGE
    wrong = {said for one in hits if (said := differs(one, wanted, short))}
    counts = {name: known[name] for name in ("compared", "mismatched")}
    cached = [one["cached"] for one in hits]
    alarmed = "" if counts == {"compared": len(hits), "mismatched": 0} else "other counts"
    seen: Seen = {
        "audit same answers": {"error": "; ".join(wrong), "hits": len(hits), "cached": cached},
        "audit no alarm": {"error": alarmed, **counts},
    }
    with kvdepot.open(dram=DRAM, ssd={"path": str(disk), **DISK}) as store:
        moved = swap_payloads(store, keys_in(store))
        assert store.flush(60.0)
    (first, *others), known = audited_engine(python, folder, disk)
    found = "" if known["mismatched"] == len(known["quarantined"]) == 1 else "not found"
    facts = {"moved": moved, "cached": first["cached"], "quarantined": known["quarantined"]}
    seen["audit pages in the wrong place are found"] = {"error": found, **facts}
    wrong = {said for one in others if (said := differs(one, wanted, 0))}
    seen["audit computed from then on"] = {"error": "; ".join(wrong), "requests": len(others)}
    return seen


def audited_engine(python: Path, folder: Path, disk: Path) -> tuple[list[Any], dict[str, Any]]:
    """What it answers, and what the depot knows of audits then."""
    out, model = folder / "audited.json", smollm2.prepare(CACHE / "models")
    with daemon(folder / "s", disk) as socket:
        where = ["--model", str(model), "--depot", str(disk), "--out", str(out)]
        started(python, "real_sglang_engine.py", [*where, "--socket", str(socket)], folder)
        with kvdepot.open(f"unix:{socket}") as depot:
            return json.loads(out.read_text())["answers"], depot.audits.list()


@contextmanager
def daemon(socket: Path, disk: Path) -> Iterator[Path]:
    """A daemon's socket."""
    command = [sys.executable, "-m", "kvdepot", "serve", "--json", "--socket", str(socket)]
    for tier, values in {"dram": DRAM, "ssd": {"path": disk, **DISK}}.items():
        for name, value in values.items():
            command += ["--set", f"{tier}.{name}={value}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        process.stdout.readline()
        yield socket
    finally:
        process.terminate()
        process.communicate()


def gpu_engines(python: Path, folder: Path) -> Seen:
    """Two engines on one depot: one that computes, and after it was killed one that loads."""
    room = Path("/dev/shm")
    model = Path(tempfile.mkdtemp(prefix="kvdepot-model-", dir=room if room.exists() else None))
    answers: list[dict[str, Any]] = []
    try:
        for more in ([], ["--forgetful", str(folder / "forget")]):
            out = folder / f"answers-{len(answers)}.json"
            where = ["--model", str(model), "--depot", str(folder / "engine"), "--out", str(out)]
            started(python, "real_sglang_gpu.py", [*where, *more], folder)
            answers.append(json.loads(out.read_text()))
    finally:
        shutil.rmtree(model, ignore_errors=True)
    return judged(*answers)


def judged(computed: dict[str, Any], loaded: dict[str, Any]) -> Seen:
    """Every hit against the one that SGLang's own tree has, and the time to its first token."""
    own = computed["tree"]
    ways = {
        "own tree": own,
        "memory": computed["memory"],
        "drive after a kill": loaded["first"],
        "memory after a kill": loaded["memory"],
    }
    seconds = [answer["seconds"] for answer in computed["first"]]
    found = [answer["cached"] for answer in computed["first"]]
    wrong = "what was never asked is cached" if any(found) else ""
    seen: Seen = {"gpu engine computed": {"error": wrong, "cached": found, "seconds": seconds}}
    for name, answers in ways.items():
        pairs = list(zip(answers, own, strict=True))
        seen[f"gpu engine {name}"] = {
            "error": next((said for pair in pairs if (said := differs(*pair, GPU_TOKENS))), ""),
            "cached": [answer["cached"] for answer in answers],
            "seconds": [answer["seconds"] for answer in answers],
            "farthest": max(apart(*pair) for pair in pairs),
        }
    control = min(apart(*pair) for pair in zip(loaded["control"], own, strict=True))
    said = "" if control > NEAR else "KV that was not loaded makes no difference"
    seen["gpu engine control"] = {"error": said, "nearest": control}
    return seen


def apart(answer: dict[str, Any], wanted: dict[str, Any]) -> float:
    """The largest difference of two log-probabilities."""
    pairs = zip(answer["logprobs"], wanted["logprobs"], strict=True)
    return float(max(abs(one - other) for one, other in pairs))


RUNS: dict[str, Run] = {"cache": run_cache, "engine": engines, "audit": audited, "weights": updated}
GPU_RUNS: dict[str, Run] = {"cache": partial(run_cache, device="cuda"), "engine": gpu_engines}


def differs(answer: dict[str, Any], wanted: dict[str, Any], cached: int) -> str:
    """What is wrong with an answer; empty: nothing."""
    if answer["tokens"] != wanted["tokens"]:
        return f"other tokens than {wanted['tokens']}"
    pairs = zip(answer["logprobs"], wanted["logprobs"], strict=True)
    if not all(abs(one - other) <= NEAR for one, other in pairs):
        return f"other log-probabilities than {wanted['logprobs']}"
    if answer["cached"] < cached or (not cached and answer["cached"]):
        return f"{answer['cached']} tokens were cached, not {cached}"
    return ""


def started(python: Path, script: str, arguments: list[str], folder: Path) -> None:
    """Run one of the scripts in this folder to its end."""
    log = folder / "log"
    paths = [ROOT / "src"]
    if script == "real_sglang_engine.py":
        paths.append(HERE / "sglang_stand_ins")
    if script == "real_sglang_gpu.py":
        paths.append(HERE)  # SGLang's processes find the linker of the control
    path = os.pathsep.join([*map(str, paths), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    command = [str(python), str(HERE / script), *arguments]
    with log.open("wb") as said:
        done = subprocess.run(
            command, env=environment, stdout=said, stderr=said, check=False, timeout=ENGINE_LIMIT_S
        )
    if done.returncode:
        tail = log.read_text(errors="replace")[-3000:]
        raise SystemExit(f"error: {script} ended with {done.returncode}\n{tail}")


if __name__ == "__main__":
    sys.exit(main())
