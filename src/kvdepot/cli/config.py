"""`kvdepot config show|check`: the settings in force, and whether a file is right."""

import argparse
from collections.abc import Iterator
from pathlib import Path

from kvdepot.cli import output
from kvdepot.cli.arguments import add_store_settings, parse_settings
from kvdepot.config import loader as config_loader
from kvdepot.config import settings as config
from kvdepot.errors import ConfigError
from kvdepot.store.drives.disk_room import nearest, shortages


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser("config", description="Show or check a configuration.")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", dest="verb", required=True)
    show = verbs.add_parser(
        "show",
        help="print every setting in force, as TOML with comments",
        description="Print every setting in force, as TOML with comments: the defaults, then "
        "the file, then KVDEPOT_… variables, then --set; the last one wins. Secrets are hidden.",
    )
    add_store_settings(show)
    output.add_json_flag(show)
    check = verbs.add_parser(
        "check",
        help="say whether a file can be used",
        description="Say whether a TOML file can be used, and whether the disks it names have the "
        "room. Exits with 1 if not.",
    )
    check.add_argument("file", type=Path, metavar="FILE")
    check.add_argument(
        "--file-only", action="store_true", help="do not look at the disks of this machine"
    )
    output.add_json_flag(check)


def run(args: argparse.Namespace) -> int:
    return run_show(args) if args.verb == "show" else run_check(args)


def run_show(args: argparse.Namespace) -> int:
    settings = config.load(args.config, env=args.env, overrides=parse_settings(args.settings))
    if args.json:
        output.document(config_loader.show(settings))
    else:
        output.data(config_loader.to_toml(settings).rstrip())
    return 0


def run_check(args: argparse.Namespace) -> int:
    """Looks at the file, without the environment, and at the disks that it names."""
    try:
        settings = config.load(args.file, env={}, overrides={})
        if not args.file_only:
            require_room(settings)
    except ConfigError as error:
        if args.json:
            found = {"ok": False, "key": error.path, "error": str(error), "hint": error.hint}
            output.document(found)
        else:
            output.error(str(error), hint=error.hint)
        return 1
    notes = [] if args.file_only else list(missing_paths(settings))
    if args.json:
        output.document({"ok": True, "notes": notes})
    else:
        for note in notes:
            output.say(f"note: {note}")
        output.data(f"{args.file}: ok")
    return 0


def require_room(settings: config.Config) -> None:
    problems = [str(disk) for disk in shortages(settings)]
    if problems:
        raise ConfigError(
            problems[0].partition(":")[0],
            "; ".join(problem.partition(": ")[2] for problem in problems),
            hint="less capacity, or another disk; --file-only for a file of another machine",
        )


def missing_paths(settings: config.Config) -> Iterator[str]:
    """Folders that an opening would make, and on which disk: it may be one that is not mounted."""
    for tier in settings.file_tiers:
        for path in tier.path:
            if not path.exists():
                where = nearest(path)
                yield f"{tier.TIER}.path: {path} does not exist; it would be made below {where}"
