"""`kvdepot completion SHELL`: a script that completes the commands and options of kvdepot.

The script contains all of them, so that completing starts no Python.
"""

import argparse
from collections.abc import Iterator
from typing import Final

from kvdepot.cli.command import Answer, Command, Option, command_tree, parse_options

SHELLS: Final = ("bash", "zsh", "fish")
Tree = list[tuple[str, Command]]


def parse_shell(text: str) -> str:
    if text not in SHELLS:
        raise ValueError(f"{text!r} is not one of {', '.join(SHELLS)}")
    return text


def run(args: argparse.Namespace) -> Answer:
    tree = command_tree()
    if args.shell == "fish":
        script = "\n".join(fish_lines(tree))
    else:
        before = ["autoload -U +X bashcompinit && bashcompinit"] if args.shell == "zsh" else []
        script = "\n".join([*before, *bash_lines(tree)])
    return Answer({"shell": args.shell, "script": script}, script)


def options_of(name: str, command: Command) -> list[Option]:
    """The options of a command, with `--help`."""
    shared = "--help  show this help message and exit"
    shared += "" if " " in name else "\n--version  print the version"
    own = [one for one in command.parsed_options() if one.name.startswith("-")]
    return [*parse_options(shared, {}), *own]


def bash_lines(tree: Tree) -> Iterator[str]:
    """A function that follows the words to a command, then offers its options, or files."""
    deeper = "|".join(f'"{name}"' for name, _ in tree[1:])
    yield "_kvdepot() {"
    yield '  local word words here="kvdepot" last="${COMP_WORDS[COMP_CWORD-1]}"'
    yield '  for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do'
    yield f'    case "$here $word" in {deeper}) here="$here $word" ;; esac'
    yield "  done"
    yield '  case "$here $last" in'
    for name, command in tree:
        for option in options_of(name, command):
            if option.metavar:
                yield f'    "{name} {option.name}") words="{" ".join(option.choices)}" ;;'
    yield '    *) case "$here" in'
    for name, command in tree:
        words = [*command.verbs, *(option.name for option in options_of(name, command))]
        yield f'      "{name}") words="{" ".join(words)}" ;;'
    yield "    esac ;;"
    yield "  esac"
    yield '  COMPREPLY=($(compgen -W "$words" -- "${COMP_WORDS[COMP_CWORD]}"))'
    yield "}"
    yield "complete -o bashdefault -o default -F _kvdepot kvdepot"


def fish_lines(tree: Tree) -> Iterator[str]:
    for name, command in tree:
        seen = "; and ".join(f"__fish_seen_subcommand_from {word}" for word in name.split()[1:])
        none = f"not __fish_seen_subcommand_from {' '.join(command.verbs)}"
        for verb, below in command.verbs.items():
            where = f"{seen}; and {none}" if seen else none
            yield f"complete -c kvdepot -f -n {quoted(where)} -a {verb} -d {quoted(below.help)}"
        for option in options_of(name, command):
            words = [f"-l {option.name[2:]}"]
            words += [f"-n {quoted(seen)}"] if seen else []
            words += ["-r"] if option.metavar else []
            words += [f"-f -a {quoted(' '.join(option.choices))}"] if option.choices else []
            yield f"complete -c kvdepot {' '.join(words)} -d {quoted(option.help)}"


def quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


COMMAND = Command(
    more="For example: kvdepot completion bash > /etc/bash_completion.d/kvdepot",
    options=f"SHELL    {', '.join(SHELLS)}",
    run=run,
    kinds={"SHELL": parse_shell},
)
