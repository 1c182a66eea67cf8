"""The argument parser of the command line. Its help shows defaults, needed packages and examples.

Called by ark.cli for every command. The help of an option ends with its default, or says that the
option is required. Examples and the extras that a command needs are found in ark.cli.examples by
the command's name.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from typing import Any, NoReturn, TypeAlias

from ark.cli.examples import EXAMPLES, NEEDS

Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

BACKEND = "NAME of a backend, as `ark info` lists them"
DEVICE = "index of the device, from 0"
CONTEXT = "positions of prompt and new tokens to reserve (default: the model's, or what fits)"
CHUNK = "prompt tokens of an iteration (default: the machine's)"
DIM = "size of a symbolic dimension of an ONNX model (default: none)"
SVG = "FILE for a chart of the ratios, with --vs (default: none)"
FIGURES = "FILE for the figures as JSON; - is the standard output (default: none)"

OTHER_NAMES = {
    "--max-tokens": "--max-new-tokens",
    "--max_tokens": "--max-new-tokens",
    "--max_new_tokens": "--max-new-tokens",
    "--max-model-len": "--context",
    "--max-num-seqs": "--slots",
    "--gpu-memory-utilization": "--memory-share",
    "--tensor-parallel-size": "--ranks",
}
"""Options of other programs, with the option of ark that has the same meaning."""


class Formatter(argparse.HelpFormatter):
    """Formats help with defaults. Line breaks in texts of several lines are kept."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        if "default" in text or "required" in text or not action.option_strings:
            return text
        if action.required:
            return f"{text} (required)"
        if action.nargs == 0 or action.default in (None, []):
            return text
        return f"{text} (default: %(default)s)"

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if "\n" not in text:
            return super()._fill_text(text, width, indent)
        return "".join(f"{indent}{line}" for line in text.splitlines(keepends=True))


class Parser(argparse.ArgumentParser):
    """A parser whose error messages escape control characters in the words that they quote."""

    def __init__(self, **settings: Any) -> None:
        settings.setdefault("formatter_class", Formatter)
        super().__init__(**settings)
        name = self.prog.removeprefix("ark ")
        examples = "".join(f"\n  {line}" for line in EXAMPLES.get(name, ()))
        needs = NEEDS.get(name)
        parts = [f"Examples:{examples}"] if examples else []
        parts += [f"Needs the extra {needs}: pip install 'ark-gpu[{needs}]'"] if needs else []
        self.epilog = "\n\n".join(parts) + "\n" if parts else None

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parses arguments as argparse does. If an unknown option is the name of an option in
        another program, the error names ark's option for the same purpose.
        """
        parsed, rest = super().parse_known_args(args, namespace)
        for word in rest:
            other = OTHER_NAMES.get(word.partition("=")[0])
            if other in self._option_string_actions:
                self.error(f"{word.partition('=')[0]} is not an option of {self.prog}: use {other}")
        return parsed, rest

    def error(self, message: str) -> NoReturn:
        """Prints the usage and the message, and ends the process with code 2."""
        from ark.cli.common import visible

        super().error(visible(message))


def option(
    parser: argparse._ActionsContainer,
    names: str,
    help: str,
    type: Callable[[str], Any] | None = None,
    default: Any = None,
    *,
    choices: Iterable[str] | None = None,
    required: bool = False,
    several: bool = False,
) -> None:
    """Adds an option with a value. names: the option's names and the name of its value in the help,
    separated by blanks, such as "-o --out FILE"; without the value's name if there are `choices`.
    several: True if the option may be given several times, for a list of values.
    """
    words = names.split(" ")
    kind: dict[str, Any] = {"type": type, "default": default, "required": required}
    if not words[-1].startswith("-"):
        kind["metavar"] = words.pop()
    if several:
        kind |= {"action": "append", "default": []}
    if choices is not None:
        kind["choices"] = choices
    parser.add_argument(*words, help=help, **kind)


def flag(parser: argparse._ActionsContainer, name: str, help: str) -> None:
    """Adds an option without a value."""
    parser.add_argument(name, action="store_true", help=help)


def add_directory(parser: argparse.ArgumentParser) -> None:
    """Adds the positional argument for the checkpoint."""
    parser.add_argument(
        "directory",
        help="a folder with config.json, safetensors files and tokenizer.json, or the name of one "
        "on the Hugging Face hub; or a GGUF file",
    )


def add_backend(parser: argparse.ArgumentParser, required: bool = False) -> None:
    """Adds `--backend`."""
    default = "" if required else " (default: the first that has a device)"
    option(parser, "--backend NAME", f"{BACKEND}{default}", required=required)


def add_quantize(parser: argparse.ArgumentParser) -> None:
    """Adds `--quantize`, by which weights are quantised while they are loaded."""
    option(
        parser,
        "--quantize",
        "bring the weights of linear layers into this format while they are loaded (default: as "
        "they are stored)",
        choices=("fp8", "int8", "int4"),
    )


def add_kv_cache(parser: argparse.ArgumentParser) -> None:
    """Adds `--kv-cache-dtype`, the type of keys and values in the cache."""
    option(
        parser,
        "--kv-cache-dtype",
        "hold keys and values as codes of 8 bits with a scale for each head and position (default: "
        "auto, as floats of the weights' type)",
        default="auto",
        choices=("auto", "fp8", "int8"),
    )


def add_device(parser: argparse.ArgumentParser, of_rank: bool = False) -> None:
    """Adds `--device`. of_rank: True if the default device depends on the rank's number on its
    host.
    """
    default = " (default: by the rank's number on its host)" if of_rank else ""
    option(parser, "--device I", f"{DEVICE}{default}", int, None if of_rank else 0)


def add_figures(parser: argparse.ArgumentParser) -> None:
    """Adds `--json`, which writes a bench's results."""
    option(parser, "--json FILE", FIGURES)


def add_turn(parser: argparse.ArgumentParser) -> None:
    """Adds `--turn`, for benches that run side by side."""
    option(
        parser,
        "--turn FILE",
        "use the device only while no other bench with this FILE does, and compile before "
        "(default: use it at once)",
    )


def add_repeats(parser: argparse.ArgumentParser, default: int = 5) -> None:
    """Adds `--repeats`."""
    meaning = "measurements of each figure, of which the median counts"
    option(parser, "--repeats N", meaning, positive, default)


def add_measurement(parser: argparse.ArgumentParser, repeats: int = 5) -> None:
    """Adds the options of a bench that measures on one device."""
    add_repeats(parser, repeats)
    add_backend(parser)
    add_device(parser)
    add_figures(parser)
    add_turn(parser)


def positive(text: str) -> int:
    """An argparse type: an integer of at least 1."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return value
