"""The `ark` command: finds the modules of subcommands, runs one, and prints an error as one
paragraph.

Each module named in COMMANDS has a function `register(subparsers)`. It adds the command's parser
and sets `func`, which takes the parsed arguments and returns the exit code. A module is imported
only when its command runs, so that `ark info` does not need the packages of `ark topo`.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import os
import signal
import stat
import sys
import textwrap
import threading
from collections.abc import Sequence

from ark import _interrupt, log
from ark._version import __version__
from ark.cli.parser import Parser, flag, option
from ark.errors import BaseError, InvalidUsageError

COMMANDS = {
    "info": "show backends, devices and versions, or require some",
    "doctor": "check what the loop kernel needs of a device",
    "generate": "generate text from a checkpoint directory",
    "chat": "talk with a checkpoint in the terminal",
    "serve": "serve a checkpoint over HTTP, as OpenAI's clients expect",
    "run": "run an ONNX model on NumPy arrays",
    "plan": "make, read and check a plan without any device",
    "emit": "write a plan's loop kernel as source for a backend",
    "export": "write a model as a C library that needs no Python",
    "tune": "measure how products are best cut on this machine, and keep it",
    "trace": "draw a plan's planned and measured timeline",
    "bench": "measure decoding, collectives and single ops beside a peer",
    "cache": "show or clear the program cache",
    "completion": "print a script by which a shell completes commands",
    "layout": "find the cheapest collectives from one layout of a tensor to another",
    "parallelize": "predict how a model is best split over ranks",
    "tessel": "find the pipeline schedule of the shortest period",
    "topo": "show, solve, synthesize and simulate collectives on a network topology",
}


def build_parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    """Returns the parser. Only the module of the subcommand that `argv` names is imported."""
    parser = Parser(
        prog="ark",
        description="Compiles a whole model into one persistent kernel per GPU.",
    )
    parser.add_argument("--version", action="version", version=f"ark {__version__}")
    _add_common(parser)
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND")
    named = next((word for word in argv if not word.startswith("-")), None)
    for name, summary in COMMANDS.items():
        if name == named:
            importlib.import_module(f"ark.cli.{name}").register(subparsers)
        else:
            subparsers.add_parser(name, help=summary, add_help=False)
    return parser


def _add_common(parser: argparse.ArgumentParser) -> None:
    """Adds the options that may be at any place of the command line."""
    flag(parser, "--debug", "show tracebacks of errors")
    option(
        parser,
        "--log-level LEVEL",
        f"lowest level of messages on standard error: {', '.join(log.NAMES)} (default: "
        "ARK_LOG_LEVEL, or WARN)",
    )


def _common(words: list[str]) -> tuple[bool, list[str]]:
    """Applies the options that may be at any place. Returns True if the user wants tracebacks, and
    the remaining words.
    """
    parser = Parser(prog="ark", add_help=False, allow_abbrev=False)
    _add_common(parser)
    common, rest = parser.parse_known_args(words)
    if common.log_level is not None:
        level = common.log_level.upper()
        if level not in log.NAMES:
            raise InvalidUsageError(
                f"--log-level is {common.log_level!r}; it must be one of {', '.join(log.NAMES)}"
            )
        log.set_level(log.NAMES.index(level))
        os.environ["ARK_LOG_LEVEL"] = level  # for ranks that this process will start
    return common.debug, rest


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line. Returns the exit code: 0 for success, 1 for a failed run, 2 for an
    error of ark.
    """
    _end_on_sigterm()
    _reopen_standard_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Prints a character that the terminal's encoding lacks as an escape sequence.
            stream.reconfigure(errors="backslashreplace")
    words = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in words
    try:
        debug, words = _common(words)
        parser = build_parser(words)  # imports the command's module
        _interrupt.becomes_exception()
        args = parser.parse_args(words)
        args.words = words
        if args.command is None:
            parser.print_help()
            return 2
        _check_given(args, words)
        code = int(args.func(args))
        sys.stdout.flush()
        return code
    except BaseError as error:
        if debug:
            raise
        from ark.cli.common import visible

        text = visible(f"ark: {error}")  # the message may quote a file
        terminal = sys.stderr is not None and sys.stderr.isatty()
        _complain(textwrap.fill(text, 100, break_on_hyphens=False) if terminal else text)
        return 2
    except MemoryError:
        _complain(
            "ark: there is too little memory; use a smaller model or context, or raise the limit "
            "on this process"
        )
        return 2
    except KeyboardInterrupt:
        return _interrupt.INTERRUPTED_EXIT_CODE
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # rich exits so when a pipe is closed
            return 141
        raise
    except OSError as error:
        # Remaining output is discarded; otherwise flushing it at the end of the process would fail.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return 141
        if debug:
            raise
        _complain(f"ark: the operating system refused: {error}; see that there is room and access")
        return 2


def _check_given(args: argparse.Namespace, words: Sequence[str]) -> None:
    """Raises InvalidUsageError for values that no command accepts. An empty prompt is the only
    empty value that is allowed.
    """
    for name, value in vars(args).items():
        if value == "" and name != "prompt":
            raise InvalidUsageError(f"the value of {name!r} is empty; give one, or leave it out")
    if any("\0" in word for word in words):
        raise InvalidUsageError("an argument has a character of code 0, which no path or name has")


def _complain(text: str) -> None:
    """Prints an error as a paragraph on standard error. A failure to print is ignored, because the
    exit code already reports the error.

    If a launcher has opened a pipe for errors, the paragraph is sent to the launcher instead.
    """
    from ark.runtime.watchdog import LAST_WORDS

    with contextlib.suppress(OSError, ValueError):
        pipe = int(os.environ.pop(LAST_WORDS, "-1"))
        if pipe >= 0 and stat.S_ISFIFO(os.fstat(pipe).st_mode):
            os.write(pipe, text.encode())
            return
    try:
        print(text, file=sys.stderr, flush=True)
    except (OSError, ValueError):
        # Remaining output is discarded; otherwise flushing it at the end of the process would fail.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def _reopen_standard_streams() -> None:
    """Opens /dev/null in place of standard streams that the parent process has closed, so that no
    other file gets their descriptors.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            with contextlib.suppress(OSError):
                os.fstat(number)
                continue
            while os.open(os.devnull, os.O_RDWR) < number:
                pass
            stream = os.fdopen(number, "w" if number else "r", closefd=False)
            setattr(sys, name, stream)


def _end_on_sigterm() -> None:
    """Makes SIGTERM raise SystemExit, so that kernels are stopped and memory is freed."""

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, end)
