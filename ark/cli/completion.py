"""`ark completion`: prints a shell script that completes ark's commands, options and choices."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterator

from ark.cli.parser import Subparsers

SHELLS = ("bash", "zsh", "fish")

BASH = """# Completion of ark's command line, by `ark completion bash`.
_ark() {{
    local word command
    word="${{COMP_WORDS[COMP_CWORD]}}"
    command="${{COMP_WORDS[1]}}"
    case "$command" in {groups}) command="$command ${{COMP_WORDS[2]}}" ;; esac
    case "$COMP_CWORD:$command:${{COMP_WORDS[COMP_CWORD-1]}}" in
        1:*) COMPREPLY=($(compgen -W "{commands}" -- "$word")); return ;;
{parts}
    esac
    case "$command" in
{options}
    esac
    [[ ${{#COMPREPLY[@]}} -gt 0 ]] || COMPREPLY=($(compgen -f -- "$word"))
}}
complete -o filenames -F _ark ark
"""


def register(subparsers: Subparsers) -> None:
    """Adds `ark completion`."""
    p = subparsers.add_parser(
        "completion",
        help="print a script by which a shell completes commands",
        description="Prints a script for the shell. For zsh: source <(ark completion zsh); for "
        "fish: ark completion fish > ~/.config/fish/completions/ark.fish",
    )
    p.add_argument("shell", choices=SHELLS, help="the shell that reads the script")
    p.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Prints the script."""
    print(script(args.shell), end="")
    return 0


def parsers() -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yields every command with its parser. The subcommands of a command follow it."""
    from ark.cli import COMMANDS
    from ark.cli.parser import Parser

    for command in COMMANDS:
        subparsers = Parser(prog="ark").add_subparsers()
        importlib.import_module(f"ark.cli.{command}").register(subparsers)
        yield from _parts(command, subparsers.choices[command])


def _parts(
    name: str, parser: argparse.ArgumentParser
) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    yield name, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for part, inner in action.choices.items():
                yield from _parts(f"{name} {part}", inner)


def script(shell: str) -> str:
    """The completion script for a shell."""
    known = dict(parsers())
    return _fish(known) if shell == "fish" else _bash(known, zsh=shell == "zsh")


def _bash(known: dict[str, argparse.ArgumentParser], zsh: bool) -> str:
    groups = {name.split()[0] for name in known if " " in name}
    parts = [
        f'        2:{group}*) COMPREPLY=($(compgen -W "{" ".join(_of(known, group))}" -- "$word"));'
        " return ;;"
        for group in sorted(groups)
    ]
    options = []
    for name, parser in known.items():
        for action in parser._actions:
            for option in action.option_strings if action.choices else ():
                words = " ".join(map(str, action.choices or ()))
                parts.append(
                    f'        *:"{name}":{option}) COMPREPLY=($(compgen -W "{words}" -- "$word"));'
                    " return ;;"
                )
        words = " ".join(_words(parser))
        options.append(f'        "{name}") COMPREPLY=($(compgen -W "{words}" -- "$word")) ;;')
    text = BASH.format(
        groups="|".join(sorted(groups)),
        commands=" ".join(name for name in known if " " not in name),
        parts="\n".join(parts),
        options="\n".join(options),
    )
    return f"autoload -U +X bashcompinit && bashcompinit\n{text}" if zsh else text


def _of(known: dict[str, argparse.ArgumentParser], group: str) -> list[str]:
    return [name.split()[1] for name in known if name.startswith(f"{group} ")]


def _words(parser: argparse.ArgumentParser) -> list[str]:
    """The options of a command, and the choices of its positional arguments."""
    words = [option for a in parser._actions for option in a.option_strings]
    plain = (a for a in parser._actions if not a.option_strings and a.choices)
    return words + [str(choice) for action in plain for choice in action.choices or ()]


def _fish(known: dict[str, argparse.ArgumentParser]) -> str:
    lines = ["# Completion of ark's command line, by `ark completion fish`."]
    for name, parser in known.items():
        command, _, part = name.partition(" ")
        if not part:
            lines.append(f"complete -c ark -n __fish_use_subcommand -a {command}")
        else:
            lines.append(f"complete -c ark -n '__fish_seen_subcommand_from {command}' -a {part}")
        seen = f"__fish_seen_subcommand_from {part or command}"
        for action in parser._actions:
            for option in action.option_strings:
                flag = f"-l {option[2:]}" if option.startswith("--") else f"-s {option[1:]}"
                choices = f" -xa '{' '.join(map(str, action.choices))}'" if action.choices else ""
                lines.append(f"complete -c ark -n '{seen}' {flag}{choices}")
    return "\n".join(lines) + "\n"
