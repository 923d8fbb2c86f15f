"""`kvdepot --completion SHELL`: what a shell needs to complete the words of our commands.

The script is made from the parsers themselves, and holds all of them: completing starts no Python.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

SHELLS: Final = ("bash", "zsh", "fish")


@dataclass(frozen=True, slots=True)
class CompletedOption:
    names: tuple[str, ...]
    help: str
    takes_value: bool
    choices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CompletedCommand:
    """One command, or verb of a command: what may follow it."""

    path: tuple[str, ...]
    verbs: dict[str, str]
    """With what they do."""
    options: tuple[CompletedOption, ...]

    @property
    def words(self) -> list[str]:
        return [*self.verbs, *(name for option in self.options for name in option.names)]


def script(shell: str, parser: argparse.ArgumentParser) -> str:
    """The completion of `parser`, which has all its commands, for one of SHELLS."""
    commands = list(walk(parser, (parser.prog,)))
    if shell == "fish":
        return "\n".join(fish_lines(commands))
    before = ["autoload -U +X bashcompinit && bashcompinit"] if shell == "zsh" else []
    return "\n".join([*before, *bash_lines(parser.prog, commands)])


def walk(parser: argparse.ArgumentParser, path: tuple[str, ...]) -> Iterator[CompletedCommand]:
    options, verbs, below = [], {}, {}
    for action in parser._actions:  # argparse has no public way to ask
        if isinstance(action, argparse._SubParsersAction):
            below = action.choices
            told = {choice.dest: choice.help or "" for choice in action._choices_actions}
            verbs = {name: told.get(name, "") for name in below}
        elif action.option_strings:
            choices = tuple(map(str, action.choices)) if action.choices else ()
            help_text = "" if action.help == argparse.SUPPRESS else action.help or ""
            options.append(
                CompletedOption(tuple(action.option_strings), help_text, action.nargs != 0, choices)
            )
    yield CompletedCommand(path, verbs, tuple(options))
    for name, one in below.items():
        yield from walk(one, (*path, name))


def bash_lines(prog: str, commands: list[CompletedCommand]) -> Iterator[str]:
    """A function that follows the words to a command, then offers what that takes, or files."""
    deeper = "|".join(f'"{" ".join(one.path)}"' for one in commands if len(one.path) > 1)
    yield f"_{prog}() {{"
    yield '  local word words here="' + prog + '" last="${COMP_WORDS[COMP_CWORD-1]}"'
    yield '  for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do'
    yield f'    case "$here $word" in {deeper}) here="$here $word" ;; esac'
    yield "  done"
    yield '  case "$here $last" in'
    for one in commands:
        for option in one.options:
            if option.choices:
                names = "|".join(f'"{" ".join(one.path)} {name}"' for name in option.names)
                yield f'    {names}) words="{" ".join(option.choices)}" ;;'
            elif option.takes_value:
                names = "|".join(f'"{" ".join(one.path)} {name}"' for name in option.names)
                yield f'    {names}) words="" ;;'
    yield '    *) case "$here" in'
    for one in commands:
        yield f'      "{" ".join(one.path)}") words="{" ".join(one.words)}" ;;'
    yield "    esac ;;"
    yield "  esac"
    yield '  COMPREPLY=($(compgen -W "$words" -- "${COMP_WORDS[COMP_CWORD]}"))'
    yield "}"
    yield f"complete -o bashdefault -o default -F _{prog} {prog}"


def fish_lines(commands: list[CompletedCommand]) -> Iterator[str]:
    for one in commands:
        prog, *names = one.path
        seen = "; and ".join(f"__fish_seen_subcommand_from {name}" for name in names)
        verbs = " ".join(one.verbs)
        none = f"not __fish_seen_subcommand_from {verbs}"
        for verb, text in one.verbs.items():
            where = f"{seen}; and {none}" if seen else none
            yield f"complete -c {prog} -f -n {quoted(where)} -a {verb} -d {quoted(text)}"
        for option in one.options:
            words = [
                f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}"
                for name in option.names
            ]
            words += [f"-n {quoted(seen)}"] if seen else []
            words += ["-r"] if option.takes_value else []
            words += [f"-f -a {quoted(' '.join(option.choices))}"] if option.choices else []
            yield f"complete -c {prog} {' '.join(words)} -d {quoted(option.help)}"


def quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
