"""`kvdepot config show|check`: shows the effective settings, and checks a file."""

import argparse
from collections.abc import Iterator

from kvdepot.cli import output
from kvdepot.cli.arguments import SETTINGS, load_settings
from kvdepot.cli.command import Answer, Command
from kvdepot.config import loader as config_loader
from kvdepot.config import settings as config
from kvdepot.errors import ConfigError
from kvdepot.store.drives.disk_room import nearest, shortages


def show(args: argparse.Namespace) -> Answer:
    settings = load_settings(args)
    return Answer(config_loader.show(settings), config_loader.to_toml(settings).rstrip())


def check(args: argparse.Namespace) -> Answer:
    """Reads the file without the environment."""
    try:
        settings = config.load(args.file, env={}, overrides={})
        if not args.file_only:
            require_room(settings)
    except ConfigError as error:
        if not args.json:
            output.error(str(error), hint=error.hint)
        found = {"ok": False, "key": error.path, "error": str(error), "hint": error.hint}
        return Answer(found, status=1)
    notes = [] if args.file_only else list(missing_paths(settings))
    lines = [f"note: {note}" for note in notes]
    return Answer({"ok": True, "notes": notes}, f"{args.file}: ok", lines)


def require_room(settings: config.Config) -> None:
    problems = [str(disk) for disk in shortages(settings)]
    if problems:
        raise ConfigError(
            problems[0].partition(":")[0],
            "; ".join(problem.partition(": ")[2] for problem in problems),
            hint="reduce the capacity, or add --file-only if the file is for another machine",
        )


def missing_paths(settings: config.Config) -> Iterator[str]:
    """Warnings for folders that do not exist: their disk may not be mounted."""
    for tier in settings.file_tiers:
        for path in tier.path:
            if not path.exists():
                where = nearest(path)
                yield f"{tier.TIER}.path: {path} does not exist; it would be created in {where}"


COMMAND = Command(
    verbs={
        "show": Command(
            "print all effective settings, as TOML with comments",
            "The defaults, then the file, then KVDEPOT_… variables, then --set; the last one "
            "counts. Secrets are hidden.",
            SETTINGS,
            show,
        ),
        "check": Command(
            "check a settings file, and the free space of its disks",
            "Exits with 1 if the file cannot be used.",
            """
            FILE           the file, as TOML
            --file-only    do not check the disks of this machine
            """,
            check,
        ),
    },
)
