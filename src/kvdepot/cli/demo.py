"""`kvdepot demo`: blocks through memory and disk, a process killed in the middle, a flipped bit.

Everything is real: a store on your disk, another process, SIGKILL, a damaged file. Every byte that
comes back is compared with what was put.
"""

import argparse
import random
from pathlib import Path

from kvdepot.cli import demo_scenes, output
from kvdepot.cli.demo_scenes import Scene
from kvdepot.cli.scratch import choose_parent, scratch_directory
from kvdepot.core.units import format_bytes

NEEDED_BYTES = 2 * demo_scenes.SSD_BYTES
KILL_DELAY_MAX_S = 0.2
HEADS = ("step", "blocks", "from dram", "from ssd", "missed", "GB/s", "verdict", "")


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "demo",
        description="See it work, in about 20 seconds: KV blocks of a chat go through memory and "
        "disk, a process is killed while it writes, a bit is flipped in a file. Every byte that "
        "comes back is checked. Exits with 1 if anything was wrong.",
    )
    parser.add_argument(
        "--path", type=Path, metavar="DIR", help="where to write (default: a temporary directory)"
    )
    parser.add_argument("--keep", action="store_true", help="keep the store, to look at it")
    parser.add_argument("--seed", type=int, default=None, help="when to kill: replay a moment")
    output.add_json_flag(parser)


def run(args: argparse.Namespace) -> int:
    facts = choose_parent(args.path, NEEDED_BYTES)
    seed = args.seed if args.seed is not None else random.randrange(1 << 16)
    with scratch_directory(Path(facts.path).resolve(), "kvdepot-demo-", keep=args.keep) as path:
        introduce(path, facts.filesystem)
        scenes = play(path / "store", random.Random(seed).uniform(0, KILL_DELAY_MAX_S))
        ok = all(scene.ok for scene in scenes)
        if args.json:
            steps = [demo_scenes.as_facts(scene) for scene in scenes]
            output.document({"ok": ok, "steps": steps, "path": path, "seed": seed})
        else:
            report(scenes, seed)
    if args.keep:
        output.say(f"kept: kvdepot inspect {path / 'store'}")
    return 0 if ok else 1


def introduce(path: Path, filesystem: str) -> None:
    layout = demo_scenes.LAYOUT
    output.say(
        f"a store in {path} ({filesystem}): {format_bytes(demo_scenes.DRAM_BYTES)} of memory over "
        f"{format_bytes(demo_scenes.SSD_BYTES)} of disk"
    )
    output.say(
        f"blocks as Llama-3.1-8B makes them, {layout.block_tokens} tokens each: "
        f"{format_bytes(layout.block_bytes)}"
    )


def play(path: Path, delay_s: float) -> list[Scene]:
    scenes = []
    with output.Progress("starting") as progress:

        def tell(what: str, amount: int) -> None:
            progress.label = what
            progress.advance(amount)

        for scene in demo_scenes.play(path, delay_s, tell):
            scenes.append(scene)
            progress.advance()
    return scenes


def report(scenes: list[Scene], seed: int) -> None:
    output.data(output.table(HEADS, map(cells, scenes)) + "\n")
    wrong = [text for scene in scenes for text in scene.wrong]
    for text in wrong:
        output.data(f"wrong: {text}")
    if wrong:
        output.data(f"{len(wrong)} things went wrong; replay with --seed {seed}")
        return
    compared = sum(scene.from_dram + scene.from_ssd for scene in scenes)
    output.data(
        f"{compared} blocks came back and every byte was right; a kill lost nothing that had been "
        "flushed, and a damaged block was a miss"
    )


def cells(scene: Scene) -> list[object]:
    speed = f"{scene.gb_per_s:.1f}" if scene.gb_per_s else "–"
    counts = [scene.blocks, scene.from_dram, scene.from_ssd, scene.missed]
    return [scene.step, *counts, speed, "ok" if scene.ok else "WRONG", scene.note]
