"""The list of metrics, made from the table in store/metrics.py.

python benchmarks/metrics_page.py            print it
python benchmarks/metrics_page.py --write    write it into docs/metrics.md
"""

import argparse
import sys
from pathlib import Path
from typing import Final

from kvdepot.store.metrics import METRICS

UNITS: Final = ("seconds", "bytes", "blocks", "tokens", "joules", "ratio")
PAGE: Final = Path(__file__).parents[1] / "docs" / "metrics.md"
BEGIN: Final = "<!-- metrics: written by benchmarks/metrics_page.py --write -->"
END: Final = "<!-- end of metrics -->"


def table() -> str:
    """The list, as Markdown."""
    lines = [
        "| metric | type | unit | labels | what it is | in `stats` |",
        "|---|---|---|---|---|---|",
    ]
    for metric in METRICS:
        labels = ", ".join(f"`{label}`" for label in metric.labels) or "–"
        name = metric.name.removesuffix("_total")
        unit = next((unit for unit in UNITS if name.endswith(f"_{unit}")), "–")
        facts = (f"`{metric.name}`", metric.kind, unit, labels, metric.help, f"`{metric.source}`")
        lines.append(f"| {' | '.join(facts)} |")
    return "\n".join(lines)


def written(page: str) -> str:
    """The page with the list as it is now."""
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n\n{table()}\n\n{END}{tail}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    if parser.parse_args().write:
        PAGE.write_text(written(PAGE.read_text()))
    else:
        sys.stdout.write(table() + "\n")


if __name__ == "__main__":
    main()
