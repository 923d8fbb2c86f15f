"""What Grafana and Prometheus are given uses metrics that exist, with labels that they have."""

import importlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvdepot.store.metrics import METRICS

FOLDER = Path(__file__).parents[3] / "deploy" / "grafana"
NAME = re.compile(r"\b(kvdepot_[a-z_]+)(?:\{([^}]*)\})?")
FROM_SCRAPES = {"instance", "job", "le"}


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / "dashboard.json").read_text())
    return found


def rules() -> list[dict[str, Any]]:
    yaml = importlib.import_module("yaml")
    found = yaml.safe_load((FOLDER / "alerts.yml").read_text())
    return [rule for group in found["groups"] for rule in group["rules"]]


def expressions() -> Iterator[str]:
    for panel in dashboard()["panels"]:
        yield from (target["expr"] for target in panel["targets"])
    yield from (one["query"]["query"] for one in dashboard()["templating"]["list"][1:])
    yield from (rule["expr"] for rule in rules())


def test_every_metric_exists_with_these_labels() -> None:
    known = {metric.name: metric for metric in METRICS}
    used = set()
    for expression in expressions():
        for name, labels in NAME.findall(expression):
            plain = re.sub(r"_(bucket|sum|count)$", "", name)
            metric = known.get(name) or known.get(plain)
            assert metric is not None, f"{name} in {expression}"
            assert (name != metric.name) == (metric.kind == "histogram"), name
            given = set(re.findall(r"(\w+)\s*=", labels))
            assert given <= {*metric.labels, *FROM_SCRAPES}, expression
            is_counter = metric.kind == "counter"
            wrapped = re.search(rf"(rate|increase)\({re.escape(name)}\b", expression)
            assert not is_counter or wrapped, f"{name} is a counter: {expression}"
            used.add(metric.name)
    assert len(used) > 20


def test_parentheses_match() -> None:
    for expression in expressions():
        for left, right in ("()", "{}", "[]"):
            assert expression.count(left) == expression.count(right), expression


def test_panels_are_titled_and_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard()["panels"]:
        assert panel["title"] and panel["targets"]
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken and at["x"] + at["w"] <= 24
        taken |= cells


def test_every_alert_says_what_to_do() -> None:
    found = rules()
    assert len({rule["alert"] for rule in found}) == len(found) > 8
    for rule in found:
        assert rule["labels"]["severity"] in ("critical", "warning")
        notes = rule["annotations"]
        assert "$labels.instance" in notes["summary"] and notes["description"].endswith((".", "}"))
