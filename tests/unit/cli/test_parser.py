"""Every command has examples. Every option has a help text, a unit if it is a number, and a default
or the word `required`. Also shell completion and the levels of messages.
"""

from __future__ import annotations

import argparse
import logging
import re
import shlex
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from ark import log
from ark.cli import COMMANDS, main
from ark.cli.completion import parsers, script
from ark.cli.examples import EXAMPLES, NEEDS

ROOT = Path(__file__).resolve().parents[3]
PARSERS = dict(parsers())
LEAVES = {
    name: parser
    for name, parser in PARSERS.items()
    if not any(isinstance(a, argparse._SubParsersAction) for a in parser._actions)
}
# The units that numeric options may name.
UNITS = re.compile(
    r"\b(tokens?|positions?|ranks?|devices?|processors?|layers?|sequences?|micro-batches|seconds|"
    r"GB/s|bytes|memory|span|index|seed|launches|repeat|measurements|trees|pieces|puts|ratio|"
    r"logits|pages|units|words|milliseconds|rank|requests|MiB|port)\b"
)


def _shown(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    return parser._get_formatter()._expand_help(action)


def _options() -> list[tuple[str, argparse.ArgumentParser, argparse.Action]]:
    return [
        (name, parser, action)
        for name, parser in LEAVES.items()
        for action in parser._actions
        if not isinstance(action, argparse._HelpAction)
    ]


def fault(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    """Returns the missing part of an option's help, or "" if it is complete."""
    text = _shown(parser, action)
    if not re.sub(r"\(.*\)", "", text).strip() and action.choices is None:
        return "no text"
    if action.option_strings and action.nargs != 0:
        if "default" not in text and "required" not in text:
            return "no default"
        number = action.type not in (None, str, Path) or isinstance(action.default, (int, float))
        if number and not UNITS.search(text):
            return "no unit"
    return ""


def test_every_option_has_text_unit_and_default() -> None:
    assert len(_options()) > 200
    wrong = [
        f"ark {name} {'/'.join(action.option_strings) or action.dest}: {reason}"
        for name, parser, action in _options()
        if (reason := fault(parser, action))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({}, "no text"),
        ({"help": "a name (default: none)"}, ""),
        ({"help": "a name"}, "no default"),
        ({"help": "a name", "default": "x"}, ""),
        ({"help": "a name", "required": True}, ""),
        ({"help": "how many", "type": int, "default": 3}, "no unit"),
        ({"help": "how many (default: all)", "type": int}, "no unit"),
        ({"help": "tokens", "type": int, "default": 3}, ""),
        ({"help": "print more", "action": "store_true"}, ""),
    ],
)
def test_help_that_leaves_something_out_is_seen(settings: dict, reason: str) -> None:
    from ark.cli.parser import Parser

    parser = Parser(prog="ark x")
    assert fault(parser, parser.add_argument("--option", **settings)) == reason


def test_rows_are_whole_where_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "40")
    assert main(["info"]) == 0
    assert "0: simulated mesh of 16 cores with private memory" in capsys.readouterr().out
    console = re.compile(r"\bConsole\((?!stderr)")  # others would wrap lines
    files = (ROOT / "ark/cli").rglob("*.py")
    own = [path.name for path in files if console.search(path.read_text())]
    assert sorted(own) == ["__init__.py", "common.py"]  # doctor prints no tables


def test_helps_fit_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = [
        (name, s) for name, parser in PARSERS.items() for s in parser.format_help().split("\n")
    ]
    assert len(lines) > 500
    assert not [(name, line) for name, line in lines if len(line) > 80]


def test_every_command_has_an_example_in_its_help() -> None:
    assert set(EXAMPLES) == set(LEAVES)
    for name, parser in LEAVES.items():
        text = parser.format_help()
        assert all(f"\n  {line}\n" in text for line in EXAMPLES[name])
        assert name not in NEEDS or f"ark-gpu[{NEEDS[name]}]" in text


@pytest.mark.parametrize(
    ("name", "line"), [(name, line) for name, lines in EXAMPLES.items() for line in lines]
)
def test_examples_are_commands_that_parse(name: str, line: str) -> None:
    program, *words = shlex.split(re.split(" >>? ", line, maxsplit=1)[0])
    assert program == "ark" and words[: len(name.split())] == name.split()
    LEAVES[name].parse_args(words[len(name.split()) :])


# Commands whose first example ends within seconds on the CPU.
RUN = (
    *("info", "generate", "plan", "completion", "cache", "layout", "parallelize", "tessel"),
    *("topo show", "topo optimal", "topo synthesize", "topo compare", "bench ops", "trace"),
)


@pytest.mark.parametrize("name", RUN)
def test_first_example_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    words = shlex.split(re.split(" >>? ", EXAMPLES[name][0])[0])[1:]
    backend = ["--backend", "cpu"] if name == "generate" else []
    assert main([*words, *backend]) == 0
    assert capsys.readouterr().out


def test_examples_of_plan_and_emit_follow_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for line in (EXAMPLES["plan"][-1], *EXAMPLES["emit"]):
        assert main(shlex.split(line)[1:]) == 0
    assert list((tmp_path / "out").iterdir())


def test_each_shell_gets_every_command_and_option() -> None:
    for shell in ("bash", "zsh", "fish"):
        text = script(shell)
        assert all(command in text for command in COMMANDS)
        assert ("--max-new-tokens" if shell != "fish" else "-l max-new-tokens") in text


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        (["pl"], {"plan"}),
        (["bench", "o"], {"ops"}),
        (["generate", "--ba"], {"--backend"}),
        (["bench", "comm", "--vs", ""], {"nccl", "gloo"}),
        (["cache", "cl"], {"clear"}),
    ],
)
def test_bash_completes(words: list[str], completed: set[str]) -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("there is no bash")
    line = " ".join(shlex.quote(word) for word in ["ark", *words])
    tail = f'COMP_WORDS=({line}); COMP_CWORD={len(words)}; _ark; printf "%s\\n" "${{COMPREPLY[@]}}"'
    done = subprocess.run(
        [bash, "-c", f"{script('bash')}\n{tail}"], capture_output=True, text=True, check=True
    )
    assert set(done.stdout.split()) == completed


@pytest.fixture
def level(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARK_LOG_LEVEL", "WARN")
    before = log.get_level()
    yield
    log.set_level(before)


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("place", [0, 99])
def test_debug_reports_planning_and_verifying(
    place: int, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", str(ROOT / "examples/noah"), "--machine", "cpu-2", "--passes", "/dev/null/x"]
    words = words[:4]
    words[place:place] = ["--log-level", "debug"]
    from ark.runtime import cache

    cache.clear()
    assert main(words) == 0
    errors = capsys.readouterr().err
    assert re.search(r"ark debug: planned 1 rank\(s\) for cpu-2: [\d.]+ ms", errors)
    assert re.search(r"ark debug: verified 1 plan\(s\) of \d+ ops each: [\d.]+ ms", errors)


@pytest.mark.usefixtures("level")
def test_unknown_level_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--log-level", "loud"]) == 2
    assert "must be one of DEBUG, INFO, WARN, ERROR" in capsys.readouterr().err


@pytest.mark.usefixtures("level")
def test_messages_are_those_of_pythons_logging(capsys: pytest.CaptureFixture[str]) -> None:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger("ark").addHandler(handler)
    try:
        log.set_level(log.INFO)
        log.info("100% of it")
        log.debug("not shown")
        logging.getLogger("ark").error("from outside")
    finally:
        logging.getLogger("ark").removeHandler(handler)
    assert [record.getMessage() for record in records] == ["100% of it", "from outside"]
    assert capsys.readouterr().err == "ark info: 100% of it\nark error: from outside\n"
    assert [log.get_level(), log.set_level(0), log.get_level()] == [1, None, 0]


@pytest.mark.usefixtures("level")
def test_long_step_says_that_it_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(log, "PATIENCE_S", 0.01)
    with log.slow("compiling"):
        end = time.monotonic() + 30
        errors = ""
        while not errors and time.monotonic() < end:
            time.sleep(0.01)
            errors = capsys.readouterr().err
    assert errors == "ark warn: compiling; this goes on\n"
    with log.slow("nothing"):
        monkeypatch.setattr(log, "PATIENCE_S", 60)


def test_names_of_algorithms_are_whole_in_80_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["topo", "compare", "ring4", "--collective", "all_gather"]) == 0
    out = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    assert "bidirectional_ring" in out and "recursive_doubling" in out and "…" not in out
    assert max(map(len, out.splitlines())) <= 80
