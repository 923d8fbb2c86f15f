"""The page of supported models: `python tests/adapters/vllm/models_page.py --write`.

Has `tried_models.py` try each architecture that vLLM has, and makes docs/models.md of what
was seen, which is kept in RESULTS: a later call tries what is not in there, `--anew` everything,
`--page-only` nothing.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tests.e2e.vllm_environments import NEWEST, NO_DEPENDENCIES, python_with

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "models.md"
RESULTS = ROOT / "benchmarks" / "results" / "vllm-models.json"
HEAD = """# Models under vLLM

Made by `python tests/adapters/vllm/models_page.py --write` on {date}, with vLLM {release} on a
CPU: decoder architectures that vLLM has, with random weights and few, narrow layers of the kinds
that their default configurations have. Another model of the same architecture has other sizes, and
may have other kinds. What cannot be served is refused when vLLM starts, with the reason
([vLLM](guides/vllm.md)). A call tries what has no result yet, `--anew` everything. {counts}.
{calls}
Most that were not run have no configuration class here, so no engine was started.

**Served**: a prompt of 500 tokens came back from memory after vLLM had forgotten it, with as many
cached tokens as vLLM's own prefix hit, the same tokens, and log-probabilities within 0.001.
*Garbage shows* says whether other bytes in their place changed log-probabilities by more than that;
where they did not, equal answers say little. Bytes are those of the small model in float32: what
was saved for the prompt, and what all pages of all layers take. Where vLLM's kernels want bfloat16
it says so.

"""
ONE_CALL = "All rows are from one call."
CALLS = """The rows come from several calls, between which the script's weights and configurations
changed; an architecture without a row was not tried with the last ones."""
SERVED = """| architecture | KV groups | cached, vLLM's own | bytes a token, all | garbage shows |
|---|---|---|---|---|
"""
OTHERS = {
    "refused": "Refused by kvdepot",
    "failed": "Runs in vLLM, but not right with kvdepot",
    "not run": "Not run on this machine",
}
NOTE = """
States of Mamba2 layers are tried with vLLM's checkpoints inside of prefill chunks switched off: its
CPU kernels lack them. Latent attention is tried with vLLM's prefix cache and chunks on: without AMX
it switches both off on a CPU, though the kernels have them.
"""


def page(seen: dict[str, Any]) -> str:
    """The page as Markdown."""
    rows = seen["rows"]
    counts = Counter(row["outcome"] for row in rows.values())
    outcomes = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
    tried = f"Tried were {len(rows)} of {seen['architectures']}: {outcomes}"
    calls = ONE_CALL if seen.get("calls") == 1 else CALLS
    parts = [HEAD.format(**{**seen, "counts": tried, "calls": calls})]
    served = [(name, row) for name, row in sorted(rows.items()) if row["outcome"] == "served"]
    parts.append(SERVED + "".join(served_line(name, row) for name, row in served))
    for outcome, title in OTHERS.items():
        found = [(name, row) for name, row in sorted(rows.items()) if row["outcome"] == outcome]
        if found:
            lines = "".join(f"| {name} | {plain(row['reason'])} |\n" for name, row in found)
            parts.append(f"\n## {title}\n\n| architecture | reason |\n|---|---|\n{lines}")
    return "".join([*parts, NOTE])


def served_line(name: str, row: dict[str, Any]) -> str:
    kinds = Counter(row["groups"])
    groups = ", ".join(f"{count} × {kind}" if count > 1 else kind for kind, count in kinds.items())
    figures = f"{row['bytes_a_token']:,}, {row['bytes_a_token_of_all_layers']:,}"
    figures += " (bfloat16)" if row.get("dtype") == "bfloat16" else ""
    shows = "yes" if row["control"] > 1e-3 else "no"
    return f"| {name} | {groups} | {row['cached']}, {row['vllm_cached']} | {figures} | {shows} |\n"


def plain(reason: str) -> str:
    """What fits into a cell: no bars, no marks, no folder of this machine."""
    for given, shown in (("|", "/"), ("`", "'"), ("<", "("), (">", ")"), ("*", "")):
        reason = reason.replace(given, shown)
    words = ["…" if re.match(r"""['"(]*/.""", word) else word for word in reason.split()]
    return " ".join(words)[:180]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("architectures", nargs="*", metavar="ARCHITECTURE", help="only these")
    parser.add_argument("--release", choices=sorted(NO_DEPENDENCIES), default=NEWEST)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page-only", action="store_true", help="of what is in the results")
    parser.add_argument("--anew", action="store_true", help="forget the results of earlier calls")
    parser.add_argument("--limit", type=float, default=150.0, help="seconds for each try")
    parser.add_argument("--write", action="store_true", help=f"to {PAGE.relative_to(ROOT)}")
    args = parser.parse_args()
    if not args.page_only:
        script = ROOT / "tests" / "e2e" / "tried_models.py"
        command = [str(python_with(args.release)), str(script), str(args.results)]
        command += ["--limit", str(args.limit), *(["--anew"] if args.anew else [])]
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
        done = subprocess.run([*command, *args.architectures], env=environment, check=False)
        if done.returncode:
            return 1
    text = page(json.loads(args.results.read_text()))
    if args.write:
        PAGE.write_text(text)
    else:
        sys.stdout.write(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
