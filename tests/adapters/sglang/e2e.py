"""kvdepot under SGLang's own cache controller: `python tests/adapters/sglang/e2e.py --json`.

Makes an environment with SGLang 0.5.23 in the cache folder when it is missing; torch and
transformers are those of the Python that runs this. The cases are in `support/real_sglang.py`. The
last line with --json is `{"ok", "points"}`. Exit status 1 if a point fails.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvdepot"
SGLANG = "sglang==0.5.23"


def python_with_sglang() -> Path:
    """An environment that looks into itself first, and then into this one's."""
    target, making = CACHE / "sglang", CACHE / "sglang-in-work"
    python = target / "bin" / "python"
    if python.exists():
        return python
    print(f"making {target} with {SGLANG}, a minute or two and 1 GB", file=sys.stderr)
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", "--clear", str(making)], check=True
    )
    (own,) = making.glob("lib/python*/site-packages")
    shared = next(path for path in sys.path if path.endswith("site-packages"))
    (own / "shared.pth").write_text(f"import site; site.addsitedir({shared!r})\n")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-cache-dir", "--no-deps"]
    pip += ["--target", str(own), "-r", str(HERE / "requirements.txt"), SGLANG]
    subprocess.run(pip, check=True)
    making.rename(target)
    return python


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--python", type=Path, help="one that has SGLang")
    args = parser.parse_args()
    try:
        python = args.python or python_with_sglang()
    except subprocess.CalledProcessError as error:
        print(f"error: SGLang cannot be installed: {error}")
        print("hint: a package index must be reachable, or give --python, one that has SGLang")
        return 2
    started = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="kvdepot-sglang-"))
    try:
        seen = run(python, folder)
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


def run(python: Path, folder: Path) -> dict[str, dict[str, Any]]:
    """What real_sglang.py has seen."""
    out, log = folder / "seen.json", folder / "log"
    script = ROOT / "tests" / "support" / "real_sglang.py"
    command = [str(python), str(script), "--depot", str(folder), "--out", str(out)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1"}
    with log.open("wb") as said:
        done = subprocess.run(command, env=environment, stdout=said, stderr=said, check=False)
    if done.returncode:
        tail = log.read_text(errors="replace")[-3000:]
        raise SystemExit(f"error: SGLang's run ended with {done.returncode}\n{tail}")
    seen: dict[str, dict[str, Any]] = json.loads(out.read_text())
    return seen


if __name__ == "__main__":
    sys.exit(main())
