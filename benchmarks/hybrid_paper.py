"""The experiments of the hybrid storage paper, simulated, beside its figures 12 to 22.

    python benchmarks/hybrid_paper.py [--parts FILE] [--report FILE] [--json]

The paper: "Enabling inference at massive scale with hybrid storage for KV cache offloading" (SK
hynix and Seagate, 2026). Its setup: DeepSeek-R1-Distill-Llama-8B on one H100 PCIe; four 3.84 TB
SSDs and twelve 30 TB hard drives behind 25 GB/s; prompts of 21,000 tokens; turn one is on the
drives before the start. The paper does not give the following, they are assumed: blocks of 16
tokens (Dynamo's with vLLM), a question of 20 tokens, and a GPU memory that keeps no more than the
running requests, since the reads were seen on the drives.
"""

import argparse
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Final

from kvdepot.cli import output
from kvdepot.cli.report import Report, Section, origin
from kvdepot.cli.tables import Table
from kvdepot.planner.parts import Parts, load_parts
from kvdepot.planner.simulation import Machines, fleet_of
from kvdepot.sim.arrivals import Conversations, MultiTurn
from kvdepot.sim.fleet import SimulatedFleet
from kvdepot.sim.results import Findings

BLOCK_TOKENS: Final = 16
SSDS, DRIVES = 4, 12
USERS: Final = 15
QUEUE_WHY: Final = (
    "with 12 drives prompts queue, since each keeps them busy for more than the second until the "
    "next one; with 24 hardly; beyond 12 the paper extrapolates, it seems without the queue"
)
BASE: Final = Machines(
    model="deepseek-r1-distill-llama-8b",
    gpu="h100-pcie",
    write_mode="back",
    policy="lru",
    keeps_memory=False,
    decides=False,
)
TALKS: Final = MultiTurn(
    users=USERS,
    system_tokens=1000,
    history_tokens=19980,
    question_tokens=20,
    answer_tokens=100,
    qps=1.0,
)


@dataclass(frozen=True, slots=True)
class Statement:
    """One statement of the paper, and what the simulation says."""

    figure: str
    what: str
    paper: str
    ours: str
    fits: str
    """`yes`, `about` or `no`."""

    inputs: str
    why: str = ""


def reproduce(parts: Parts, step: Callable[[], None]) -> list[Statement]:
    """All of them; about a minute on one core."""
    experiments = Experiments(parts, step)
    return [
        *_turns(experiments),
        *_users(experiments),
        *_hybrid(experiments),
        *_capacity(parts),
        *_closing(experiments),
        *_bandwidth(experiments),
        *_drives(experiments),
        *_prefill(experiments, parts),
    ]


class Experiments:
    """Runs the paper's machines."""

    def __init__(self, parts: Parts, step: Callable[[], None]) -> None:
        remote = replace(parts.tiers["ssd"], remote=True)
        self._parts = replace(parts, tiers={**parts.tiers, "ssd": remote})
        self._step = step

    def recompute(self, talks: MultiTurn) -> Findings:
        return self._run(replace(BASE, reuse=False), talks, "")

    def ssd(self, talks: MultiTurn) -> Findings:
        return self._run(replace(BASE, tiers={"ssd": SSDS}), talks, "ssd")

    def hybrid(self, talks: MultiTurn) -> Findings:
        return self._run(replace(BASE, tiers={"ssd": SSDS, "hdd": DRIVES}), talks, "hdd")

    def drives(self, talks: MultiTurn, drives: int) -> Findings:
        """Hard drives alone."""
        return self._run(replace(BASE, tiers={"hdd": drives}), talks, "hdd")

    def drive_rate(self, drives: int) -> float:
        """Bytes a second that so many drives read at most."""
        setup = fleet_of(replace(BASE, tiers={"hdd": drives}), self._parts, BLOCK_TOKENS)
        medium, nbytes = setup.tiers[0].medium, setup.block_bytes
        units = drives * nbytes / (medium.seek_s + nbytes / medium.read_bytes_per_s)
        return min(units, setup.network_bytes_per_s)

    def _run(self, machines: Machines, talks: MultiTurn, first: str) -> Findings:
        """Turn one of all users is in tier `first` from the start."""
        workload = talks.workload(BLOCK_TOKENS)
        setup = fleet_of(machines, self._parts, BLOCK_TOKENS)
        if first:
            blocks: dict[int, None] = {}
            for user in range(talks.users):
                blocks |= dict.fromkeys(workload.request(user * talks.turns).blocks.tolist())
            setup = replace(setup, preload={first: tuple(blocks)})
        found = SimulatedFleet(setup, workload).run(Conversations(talks), lambda done: None)
        self._step()
        return found


def _ttft(found: Findings) -> float:
    spread = found.ttft
    return spread.mean if spread is not None else 0.0


def _end(found: Findings) -> float:
    spread = found.end_to_end
    return spread.mean if spread is not None else 0.0


def _turn_ttft(found: Findings, turn: int, turns: int) -> float:
    times = [one.ttft_s for one in found.served if one.number % turns == turn]
    return sum(times) / len(times)


def _percent(share: float) -> str:
    return f"{share:+.0%}".replace("-", "−").replace("%", " %")


def _change(new: float, old: float) -> str:
    return _percent(new / old - 1.0)


def _fits(ours: float, paper: float, close: float = 0.1, near: float = 0.35) -> str:
    """By how far the value is off, as a share of the paper's."""
    off = abs(ours - paper) / abs(paper)
    return "yes" if off <= close else "about" if off <= near else "no"


def _fits_share(ours: float, paper: float) -> str:
    """By how many hundredths two shares differ."""
    off = abs(ours - paper)
    return "yes" if off <= 0.05 else "about" if off <= 0.15 else "no"


def _turns(experiments: Experiments) -> list[Statement]:
    talks = replace(TALKS, turns=15, qps=0.1)
    cold, warm = experiments.recompute(talks), experiments.ssd(talks)
    first, last = (_turn_ttft(warm, turn, 15) for turn in (0, 14))
    before, after = (_turn_ttft(cold, turn, 15) for turn in (0, 14))
    inputs = "15 users, QPS 0.1 (assumed, as in figure 11), 15 turns"
    stable = "yes" if last / first < 1.2 else "no"
    return [
        Statement(
            "12",
            "TTFT turn 1 → 15, recompute",
            "grows",
            f"{before:.2f} → {after:.2f} s",
            "yes" if after > before else "no",
            inputs,
        ),
        Statement(
            "12",
            "TTFT turn 1 → 15, SSD × 4",
            "stable",
            f"{first:.3f} → {last:.3f} s",
            stable,
            inputs,
        ),
    ]


def _users(experiments: Experiments) -> list[Statement]:
    few, many = (replace(TALKS, users=users) for users in (10, 50))
    cold = _ttft(experiments.recompute(many)) / _ttft(experiments.recompute(few))
    warm = _ttft(experiments.ssd(many)) / _ttft(experiments.ssd(few))
    rising = [experiments.recompute(replace(one, qps=one.users / 15.0)) for one in (few, many)]
    other = _ttft(rising[1]) / _ttft(rising[0])
    inputs = "QPS 1 (assumed, as in figures 14 to 18), 10 turns"
    stable = "yes" if warm < 1.2 else "about" if warm < 2.0 else "no"
    why = f"the rate is not given; if each user asks every 15 s instead, it is {other:.0f} ×"
    return [
        Statement(
            "13",
            "TTFT 10 → 50 users, recompute",
            "20 ×",
            f"{cold:.0f} ×",
            _fits(cold, 20.0),
            inputs,
            why,
        ),
        Statement("13", "TTFT 10 → 50 users, SSD × 4", "stable", f"{warm:.1f} ×", stable, inputs),
    ]


def _hybrid(experiments: Experiments) -> list[Statement]:
    cold, warm = experiments.recompute(TALKS), experiments.hybrid(TALKS)
    ttft, end = _ttft(warm) / _ttft(cold) - 1.0, _end(warm) / _end(cold) - 1.0
    inputs = "15 users, QPS 1, 10 turns, 100 tokens of answer"
    drop = f"{_ttft(cold):.2f} → {_ttft(warm):.2f} s"
    return [
        Statement(
            "14",
            "TTFT, hybrid against recompute",
            "−95 %",
            f"{_change(_ttft(warm), _ttft(cold))} ({drop})",
            _fits_share(ttft, -0.95),
            inputs,
            "turn one waits for the hard drives and is a tenth of the mean; the paper's own gap "
            "of 7.6 s at one turn (figure 18) over 10 turns is 0.76 s, which is 5 % only of a "
            "recompute mean of 15 s or more",
        ),
        Statement(
            "15",
            "end to end, hybrid against recompute",
            "−80 %",
            _change(_end(warm), _end(cold)),
            _fits_share(end, -0.80),
            inputs,
            "the paper does not say how it decodes; faster decoding weighs prefill more",
        ),
    ]


def _capacity(parts: Parts) -> list[Statement]:
    ssd, hdd = parts.tiers["ssd"], parts.tiers["hdd"]
    small, raw = SSDS * ssd.unit, DRIVES * hdd.unit
    mirrored = raw / 2 / small
    price = SSDS * (ssd.price + ssd.slot_price) + DRIVES * (hdd.price + hdd.slot_price)
    each = price / (raw / 2) / ((ssd.price + ssd.slot_price) / ssd.unit) - 1.0
    return [
        Statement(
            "16",
            "capacity of hybrid against SSD × 4",
            "11 ×",
            f"{raw / small:.1f} × raw, {mirrored:.1f} × mirrored",
            _fits(mirrored, 11.0),
            "table 1: 12 × 30 TB against 4 × 3.84 TB",
            "360 TB over 15.36 TB is 23; 11 follows only if the RAID mirrors, which is not said",
        ),
        Statement(
            "17",
            "cost of a byte kept",
            "−75 %",
            _percent(each),
            _fits_share(each, -0.75),
            "parts list, drives mirrored, with their slots",
        ),
    ]


def _closing(experiments: Experiments) -> list[Statement]:
    rows, inputs = [], "15 users, QPS 1, 100 tokens of answer"
    for turns, paper in ((1, 7.6), (10, None), (50, 0.35)):
        talks = replace(TALKS, turns=turns)
        gap = _ttft(experiments.hybrid(talks)) - _ttft(experiments.ssd(talks))
        rows.append(
            Statement(
                "18",
                f"TTFT of hybrid beyond SSD × 4, {turns} turns",
                f"{paper} s" if paper else "falls",
                f"{gap:.2f} s",
                _fits(gap, paper) if paper else "yes",
                inputs,
                "one slow turn in 50 is a fiftieth of 7.6 s, 0.15 s; the paper's 0.35 s has "
                "something else in it"
                if turns == 50
                else "",
            )
        )
    return rows


def _bandwidth(experiments: Experiments) -> list[Statement]:
    rows = []
    for seconds, paper in ((100, 0.88), (1000, 0.15)):
        talks = replace(TALKS, turns=round(seconds * 4.0 / USERS), qps=4.0)
        slow, fast = (
            _read_rate(run(talks), seconds) for run in (experiments.hybrid, experiments.ssd)
        )
        gap = 1.0 - slow / fast
        rows.append(
            Statement(
                "19",
                f"read bandwidth of hybrid below SSD × 4, {seconds} s",
                f"{paper:.0%}",
                f"{gap:.0%}",
                _fits_share(gap, paper),
                "15 users, QPS 4, bytes asked for in that time",
                "in the model all first turns are read within half a minute, then all comes from "
                "SSDs; the paper does not say what kept its drives busy for longer"
                if gap < paper
                else "",
            )
        )
    return rows


def _read_rate(found: Findings, seconds: float) -> float:
    """Bytes a second that had arrived by then."""
    done = sum(sum(one.hits.values()) for one in found.served if one.fetched_s <= seconds)
    return done / seconds


DRIVES_INPUTS: Final = "15 users, QPS 1, one turn, no SSD"


def _drives(experiments: Experiments) -> list[Statement]:
    talks = replace(TALKS, turns=1)
    found = {count: experiments.drives(talks, count) for count in (4, 8, 12, 24, 36, 48)}
    times = {count: _ttft(one) for count, one in found.items()}
    speed = {count: experiments.drive_rate(count) / experiments.drive_rate(4) for count in (8, 12)}
    falls = {count: times[count] / times[12] - 1.0 for count in (24, 36, 48)}
    full = 25e9 / experiments.drive_rate(1)
    return [
        Statement(
            "20",
            "read rate of 8 and 12 drives against 4",
            "2 ×, 3 ×",
            f"{speed[8]:.1f} ×, {speed[12]:.1f} ×",
            "yes",
            DRIVES_INPUTS,
            f"TTFT falls {times[4] / times[8]:.1f} × and {times[4] / times[12]:.1f} ×: queues "
            "shorten faster than the rate grows",
        ),
        Statement(
            "20",
            "TTFT, 12 → 24 drives",
            "−50 %",
            _percent(falls[24]),
            _fits_share(falls[24], -0.5),
            DRIVES_INPUTS,
            QUEUE_WHY,
        ),
        Statement(
            "20",
            "TTFT, 12 → 36 drives and more",
            "−60 %",
            _percent(falls[36]),
            _fits_share(falls[36], -0.6),
            DRIVES_INPUTS,
            QUEUE_WHY,
        ),
        Statement(
            "20",
            "where the network's 25 GB/s caps",
            "36 drives",
            f"{full:.0f} drives",
            "no",
            "275 MB/s and 12 ms before each 2 MiB block",
            "36 drives read at most 36 × 275 MB/s = 9.9 GB/s, so nothing is capped yet; TTFT with "
            f"48: {_percent(falls[48])}",
        ),
        *_demand(experiments, found),
    ]


def _demand(experiments: Experiments, found: Mapping[int, Findings]) -> list[Statement]:
    """What the GPU asks of the drives."""
    share = {count: _share(found[count], experiments.drive_rate(count)) for count in (4, 12)}
    prompt = found[4].tiers[0].bytes_read / USERS
    enough = ceil(prompt * TALKS.qps / experiments.drive_rate(1))
    return [
        Statement(
            "21",
            "highest above average read rate, 4 and 12 drives",
            "2 ×, 1.2 ×",
            f"{1 / share[4]:.1f} ×, {1 / share[12]:.1f} ×",
            "no",
            DRIVES_INPUTS,
            "in the model a queue keeps the drives at their highest rate all the time",
        ),
        Statement(
            "21",
            "drives that meet the GPU's demand",
            "24",
            f"{enough}",
            _fits(enough, 24.0),
            DRIVES_INPUTS,
            f"one prompt of {prompt / 1e9:.2f} GB a second",
        ),
    ]


def _share(found: Findings, most: float) -> float:
    """Average over highest read rate, from the first to the last byte."""
    seconds = max(one.fetched_s for one in found.served)
    return found.tiers[-1].bytes_read / seconds / most


def _prefill(experiments: Experiments, parts: Parts) -> list[Statement]:
    talks = replace(TALKS, answer_tokens=2)
    cold, warm = experiments.recompute(talks).gpu_busy, experiments.hybrid(talks).gpu_busy
    gpu = parts.gpu(BASE.gpu)
    watts = gpu.average_power_w(warm) / gpu.average_power_w(cold) - 1.0
    inputs = "15 users, QPS 1, 10 turns, 2 tokens of answer"
    return [
        Statement(
            "22",
            "GPU utilisation in prefill",
            "−76 %",
            _change(warm, cold),
            _fits_share(warm / cold - 1.0, -0.76),
            inputs,
            "ours counts steps only; the paper's counter perhaps also runs while KV is copied in",
        ),
        Statement(
            "22",
            "GPU power",
            "−52 %",
            _percent(watts),
            _fits_share(watts, -0.52),
            inputs,
            "60 W idle and 350 W busy, linear between (assumed); copies draw power too",
        ),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", type=Path, metavar="FILE", help="what the tiers and GPUs can do")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write a page here")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    args = parser.parse_args()
    with output.Progress("the hybrid paper's experiments") as line:
        rows = reproduce(load_parts(args.parts), lambda: line.advance())
    if args.report is not None:
        args.report.write_text(as_page(rows), encoding="utf-8")
    if args.json:
        output.document({"paper": "hybrid", "rows": rows})
        return 0
    cells = [[row.figure, row.what, row.paper, row.ours, row.fits] for row in rows]
    output.data(Table(["figure", "what", "paper", "ours", "fits"], cells).text())
    output.data("")
    for row in rows:
        if row.why:
            output.data(f"{row.figure}: {row.why}")
    return 0


def as_page(rows: list[Statement]) -> str:
    """The paper's statements beside ours, as HTML."""
    heads = ("figure", "what", "paper", "ours", "fits", "inputs", "why")
    cells = [
        [row.figure, row.what, row.paper, row.ours, row.fits, row.inputs, row.why] for row in rows
    ]
    lead = "SK hynix and Seagate, 2026, figures 12 to 22: what it says, and what is simulated."
    section = Section("Statements", [Table(heads, cells)])
    report = Report("kvdepot sim: the hybrid storage paper", lead, [section])
    return report.html(origin(shlex.join(sys.argv)))


if __name__ == "__main__":
    sys.exit(main())
