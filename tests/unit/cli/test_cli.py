"""The command line: its output and its refusals."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ark
from ark.backend import native, registry
from ark.backend.protocol import Probe
from ark.cli import COMMANDS, main
from tests.checkpoints import make_checkpoint

NOAH = str(Path(__file__).resolve().parents[3] / "examples/noah")


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    assert main(["plan", NOAH, "--machine", "cpu-2", "-o", str(path)]) == 0
    return path


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """Runs a command that must fail with exit code 2 and one paragraph; returns the paragraph."""
    assert main(list(argv)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    if "no accelerator found" in err.splitlines()[0]:
        err = err.split("\n", 1)[1]
    assert err.startswith("ark: ")
    assert "Traceback" not in err
    assert "\n\n" not in err.strip()
    return " ".join(err.split())


@pytest.mark.parametrize(
    ("command", "option", "other"),
    [
        ("generate", "--max-tokens", "--max-new-tokens"),
        ("generate", "--tensor-parallel-size=2", "--ranks"),
        ("chat", "--max_tokens", "--max-new-tokens"),
        ("serve", "--max-num-seqs", "--slots"),
        ("serve", "--gpu-memory-utilization", "--memory-share"),
    ],
)
def test_options_by_other_programs_names(
    capsys: pytest.CaptureFixture[str], command: str, option: str, other: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(
            [command, NOAH, "--chunk", "4", *(["--prompt", "x"] * (command == "generate")), option]
        )
    name = option.partition("=")[0]
    words = f"ark {command}: error: {name} is not an option of ark {command}: use {other}\n"
    assert caught.value.code == 2 and capsys.readouterr().err.endswith(words)


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    assert all(command in shown for command in COMMANDS)


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    assert "usage: ark" in capsys.readouterr().out


def test_module_and_version() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ark", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"ark {ark.__version__}\n"


def test_generate_streams_the_text_that_json_reports(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["generate", NOAH, "--backend", "cpu", "--prompt", "David", "--max-new-tokens", "12"]
    assert main(argv) == 0
    streamed = capsys.readouterr().out
    assert main([*argv, "--json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    answer = json.loads(lines[-1])
    assert list(answer) == ["text", "tokens"]
    assert answer["text"] + "\n" == streamed
    assert len(answer["tokens"]) == 12


def test_name_of_the_hub_is_told_how_to_be_downloaded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    message = refused(capsys, "generate", "meta-llama/Llama-3.2-1B", "--prompt", "x")
    assert "hf download meta-llama/Llama-3.2-1B --local-dir Llama-3.2-1B" in message
    assert "hf download" not in refused(capsys, "generate", "../nowhere/at-all", "--prompt", "x")


def test_several_prompts_equal_single_prompts(capsys: pytest.CaptureFixture[str]) -> None:
    prompts = ("David", "And God said")
    argv = ["generate", NOAH, "--backend", "cpu", "--json", "--max-new-tokens", "8"]
    alone = []
    for prompt in prompts:
        assert main([*argv, "--prompt", prompt]) == 0
        alone.append(capsys.readouterr().out)
    given = [word for prompt in prompts for word in ("--prompt", prompt)]
    assert main([*argv, *given]) == 0
    assert capsys.readouterr().out == "".join(alone)


def test_generate_says_how_fast_it_was_and_that_the_context_is_full(
    capsys: pytest.CaptureFixture[str],
) -> None:
    argv = ["generate", NOAH, "--backend", "cpu", "--prompt", "David", "--max-new-tokens", "64"]
    assert main([*argv, "--context", "12"]) == 0
    errors = " ".join(capsys.readouterr().err.split())
    assert re.search(r"\d+ prompt tokens and the first new one in [\d.]+ ms; \d+ more in ", errors)
    assert re.search(r"context is full: 12 positions hold \d+ tokens .* raise --context", errors)
    assert main([*argv[:-1], "2"]) == 0
    assert "context" not in capsys.readouterr().err
    assert main([*argv[:-1], "600"]) == 0
    assert "new ones; the model has no more" in " ".join(capsys.readouterr().err.split())


def test_prompt_in_a_locale_that_is_not_utf8s() -> None:
    """A prompt is read as UTF-8 although Python's locale is not UTF-8."""
    words = ["generate", NOAH, "--backend", "cpu", "--max-new-tokens", "2", "--json"]
    command = [sys.executable, "-m", "ark", *words, "--prompt", "Noé"]
    outputs = [
        subprocess.run(command, env={**os.environ, **more}, capture_output=True, check=True).stdout
        for more in ({}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"})
    ]
    assert outputs[0] == outputs[1] != b""


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo 'loop.cpp:3: this machine has no C++' >&2; exit 1", "this machine has no C++"),
        ("exit 3", "exited with code 3, without output or result"),
        ("exit 0", "exited with code 0, without output or result"),
        ("kill -9 $$", "signal 9 (SIGKILL)"),
    ],
)
def test_compiler_that_refuses_says_why(
    tmp_path: Path,
    script: str,
    words: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiler = tmp_path / "cxx"
    compiler.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exit 0\n{script}\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("ARK_CACHE_DIR", str(tmp_path / "cache"))
    native.find_compiler.cache_clear()
    try:
        message = refused(capsys, "generate", NOAH, "--backend", "cpu", "--prompt", "x")
    finally:
        native.find_compiler.cache_clear()
    assert words in message and "set CXX to one" in message, message


def test_info_at_80_columns_shows_whole_remedies(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    remedy = "pip install 'ark-gpu[rocm]' and then a command that is far longer than a column " * 2
    lacking = Probe(reason="it lacks a package", remedy=remedy.strip())
    monkeypatch.setattr("ark.cli.info.registry.probe", lambda name: lacking)
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["info"]) == 0
    lines = capsys.readouterr().out.splitlines()
    table = [i for i, line in enumerate(lines) if "│" in line or "┃" in line]
    assert all(len(lines[i]) <= 80 for i in table)
    assert [i > max(table) for i, line in enumerate(lines) if line.endswith(remedy.strip())] == [
        True
    ] * len(registry.names())


def test_info(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--json", "--require", "cpu:1"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ark"] == ark.__version__
    assert report["backends"]["cpu"]["devices"][0]["index"] == 0
    assert set(report["backends"]) >= {"cpu", "cuda", "rocm"}
    assert main(["info"]) == 0
    assert "cache: " in capsys.readouterr().out


def test_info_shows_a_remedy_unchanged(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lacking = Probe(reason="it lacks a package", remedy='pip install "ark-gpu[cuda]"')
    monkeypatch.setattr("ark.cli.info.registry.probe", lambda name: lacking)
    assert main(["info"]) == 0
    shown = "".join(c for c in capsys.readouterr().out if c.isascii() and not c.isspace())
    assert 'ark-gpu[cuda]"' in shown


def test_info_require_fails_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--json", "--require", "cpu:99"]) == 2
    assert "99" in capsys.readouterr().err


def test_plan_is_the_same_bytes_and_reads_back(
    plan_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rewritten = tmp_path / "again.json"
    assert main(["plan", str(plan_file), "-o", str(rewritten)]) == 0
    assert rewritten.read_bytes() == plan_file.read_bytes()
    other = tmp_path / "other.json"
    assert main(["plan", NOAH, "--machine", "cpu-2", "-o", str(other)]) == 0
    assert other.read_bytes() == plan_file.read_bytes()
    assert main(["plan", str(plan_file), "--tasks"]) == 0
    shown = capsys.readouterr().out
    assert "phase prompt" in shown and "phase decode" in shown and "processor 1" in shown


@pytest.mark.parametrize("machine", ["h100", "h200", "b200", "a100", "mi300x", "mi355x", "cpu-3"])
def test_plan_works_for_machines_that_are_not_present(
    machine: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", NOAH, "--machine", machine, "--context", "64"]) == 0
    assert machine in capsys.readouterr().out


@pytest.mark.parametrize(
    ("backend", "machine", "mark"),
    [
        ("cpu", "cpu-2", "pthread_create"),
        ("cuda", "h100", "__global__"),
        ("rocm", "mi300x", "amdgcn"),
    ],
)
def test_emit_writes_the_source(backend: str, machine: str, mark: str, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    argv = ["plan", NOAH, "--machine", machine, "--context", "64", "--chunk", "0", "-o", str(plan)]
    assert main(argv) == 0
    argv = ["emit", str(plan), "--backend", backend, "-o", str(tmp_path / "out")]
    assert main(argv) == 0
    (path,) = (tmp_path / "out").iterdir()
    assert mark in path.read_text()
    first = path.read_bytes()
    assert main(argv) == 0
    assert path.read_bytes() == first


@pytest.mark.parametrize(("backend", "arch"), [("rocm", None), ("rocm", "gfx942"), ("cuda", None)])
def test_emit_refuses_a_plan_of_another_vendor(
    backend: str,
    arch: str | None,
    plan_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`ark emit` refuses a CPU's plan for a GPU backend, because a CPU's plan has warps of one
    lane.
    """
    extra = ["--arch", arch] if arch else []
    argv = ["emit", str(plan_file), "--backend", backend, *extra, "-o", str(tmp_path / "out")]
    assert main([*argv, "--binary"]) == 2
    errors = " ".join(capsys.readouterr().err.split())
    assert (
        "the plan was made for cpu-2" in errors and "plan again with `ark plan --machine`" in errors
    )
    assert not (tmp_path / "out").exists()


def test_emit_refuses_an_architecture_that_lacks_the_plans_variant(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = tmp_path / "plan.json"
    argv = ["plan", NOAH, "--machine", "mi300x", "--context", "64", "--chunk", "0", "-o", str(plan)]
    assert main(argv) == 0
    argv = ["emit", str(plan), "--backend", "rocm", "--arch", "gfx1100", "-o", str(tmp_path / "o")]
    assert main(argv) == 2
    assert "do not run on rocm gfx1100" in " ".join(capsys.readouterr().err.split())


def test_plan_prints_a_summary_and_all_of_it_when_asked(
    plan_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(plan_file)]) == 0
    short = capsys.readouterr().out
    assert main(["plan", str(plan_file), "--ops"]) == 0
    long = capsys.readouterr().out
    assert "attention" in short and len(short.splitlines()) < 50 < len(long.splitlines())
    assert main(["plan", str(plan_file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(plan_file.read_text())
    out = tmp_path / "again.json"
    assert main(["plan", str(plan_file), "-o", str(out)]) == 0
    errors = capsys.readouterr()
    assert f"wrote {out}: {len(plan_file.read_text()):,} bytes" in errors.err and not errors.out


def test_plan_shows_ranks_that_do_the_same_once(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["plan", NOAH, "--machine", "h100", "--ranks", "2", "--context", "64"]
    assert main(argv) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("plan of ranks 0, 1 of 2\n") and shown.count("plan of") == 1
    assert main([*argv, "--json"]) == 0
    assert [p["rank"] for p in json.loads(capsys.readouterr().out)] == [0, 1]


def test_offline_commands_warn_of_a_plan_beyond_the_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`ark plan` and `ark emit` refuse a model whose plan needs more memory than the
    machine has.
    """
    model = registry.machine("mi300x")
    small = dataclasses.replace(model, memory_bytes=1 << 20)
    monkeypatch.setattr(registry, "machine", lambda name: small)
    plan = tmp_path / "plan.json"
    argv = ["plan", NOAH, "--machine", "mi300x", "--context", "64", "--chunk", "0"]
    assert main([*argv, "-o", str(plan)]) == 1
    words = r"the plan needs \d+\.\d\d MB of device memory .*but mi300x has only 1\.05 MB"
    assert re.search(words, capsys.readouterr().err)
    assert main(["emit", str(plan), "--backend", "rocm", "-o", str(tmp_path / "out")]) == 1
    assert re.search(words, capsys.readouterr().err)


def test_trace_is_readable(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    argv = ["trace", NOAH, "--backend", "cpu", "-o", str(path), "--max-new-tokens", "2"]
    assert main(argv) == 0
    events = json.loads(path.read_text())["traceEvents"]
    names = {e["args"]["name"] for e in events if e["ph"] == "M"}
    assert "measured" in names and "processor 0" in names
    spans = [e for e in events if e["ph"] == "X"]
    assert {e["pid"] for e in spans} == {0, 1}
    assert all(e["dur"] > 0 and e["ts"] >= 0 for e in spans)
    assert any(e["name"] == "decode.head.logits" for e in spans)


def test_cache_clear(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ARK_CACHE_DIR", str(tmp_path / "cache"))
    assert main(["cache"]) == 0
    assert capsys.readouterr().out.startswith("0 entries")
    argv = ["generate", NOAH, "--backend", "cpu", "--prompt", "A", "--max-new-tokens", "1"]
    assert main(argv) == 0
    # The cache has the kernel and, if this process was the first to need it, a compiled Python
    # extension.
    entries = sorted((tmp_path / "cache/programs").iterdir())
    for entry in entries:
        entry.write_bytes(entry.read_bytes()[:100])  # a damaged entry is replaced
    assert main(argv) == 0
    assert sorted((tmp_path / "cache/programs").iterdir()) == entries
    assert any(entry.stat().st_size > 100 for entry in entries)
    assert main(["cache", "clear"]) == 0
    assert f"removed {len(entries) + 1} entries" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["generate", "/nowhere", "--prompt", "x"], "/nowhere does not exist"),
        (["generate", NOAH, "--prompt", "", "--backend", "cpu"], ""),
        (["generate", NOAH, "--prompt", "x", "--backend", "tpu"], "backend 'tpu' is not installed"),
        (["generate", NOAH, "--prompt", "x", "--temperature", "-1"], "temperature is -1;"),
        (["generate", NOAH, "--prompt", "x", "--temperature", "nan"], "temperature is nan"),
        (["generate", NOAH, "--prompt", "x", "--context", "9999"], "allows 1 to 512"),
        (["generate", NOAH, "--prompt", "x", "--ranks", "3"], "not divisible by 3 ranks"),
        (
            ["generate", NOAH, "--prompt", "x", "--prompt", "y", "--ranks", "2"],
            "are decoded on one rank",
        ),
        (["generate", NOAH, "--prompt", "-", "--prompt", "-"], "standard input is one text"),
        (["generate", NOAH, "--prompt", "x", "--device", "7"], "CPU device 7 does not exist"),
        (["generate", NOAH, "--prompt", "x", "--budget", "0"], "budget is 0"),
        (["serve", "/nowhere"], "/nowhere does not exist"),
        (["plan", NOAH], "--machine"),
        (["plan", NOAH, "--machine", "abacus"], "the machine model 'abacus' does not exist"),
        (["plan", "/nowhere/at/all", "--machine", "cpu-1"], "/nowhere/at/all does not exist"),
        (["plan", "gpt-9", "--machine", "cpu-1"], "gpt-9"),
        (["emit", "/nowhere.json", "--backend", "cpu", "-o", "/tmp/x"], "cannot be read"),
        (["info", "--json", "--require", "cpu:x"], "not a requirement"),
        (["bench", "decode", "--set", "name=3", "--backend", "cpu"], "--set name=3"),
        (["bench", "decode", "--config", NOAH, "--ranks", "3"], "not divisible by 3 ranks"),
        (["bench", "decode", "--ranks", "2", "--vs", "torch"], "--check need one device"),
    ],
)
def test_bad_calls_are_one_paragraph(
    argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if words:
        assert words in refused(capsys, *argv)
    else:
        assert main(argv) in (0, 2)


def test_prompt_longer_than_the_context(capsys: pytest.CaptureFixture[str]) -> None:
    text = "and the king said to them " * 200
    argv = ["generate", NOAH, "--backend", "cpu", "--prompt", text]
    held = "but the context holds 512 positions"
    last = "needs a place; shorten the prompt (the model has no more)"
    message = refused(capsys, *argv)
    assert held in message and last in message
    assert "shorten the prompt or raise --context" in refused(capsys, *argv, "--context", "40")
    very = refused(capsys, *argv[:-1], text * 1000)
    assert "the first 8,192 of 5,200,000 characters of the prompt are" in very
    assert held in very and last in very


def test_prompt_for_which_there_is_no_room_is_refused_before_planning(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ark.cli.generate.Generator", None)
    argv = ["generate", NOAH, "--backend", "cpu", "--prompt", "x"]
    assert "the context holds 1 positions" in refused(capsys, *argv, "--context", "1")


def test_backend_without_a_device_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    from ark.backend import registry

    for name in ("cuda", "rocm"):
        if registry.probe(name).devices:
            continue
        text = refused(capsys, "generate", NOAH, "--prompt", "x", "--backend", name)
        assert f"the backend {name!r} has no usable device: " in text
        assert "to fix it: " in text


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "not a valid plan"),
        ("{}", "not a plan of format"),
        ("null", "not a plan of format 1 (found null)"),
        ('{"format": 1}', "the plan is damaged"),
        ("[" * 100000, "not a valid plan"),
    ],
)
def test_damaged_plan_files(
    content: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.json"
    path.write_text(content)
    for argv in (["plan"], ["emit", "--backend", "cpu", "-o", str(tmp_path / "out")]):
        assert f"{path}: " in (message := refused(capsys, *argv, str(path))) and words in message


def test_changed_plan_file_is_refused(
    plan_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = json.loads(plan_file.read_text())
    tasks = data["phases"][1]["processors"][1]
    waiting = next(t for t in tasks if t[2])
    waiting[2] = []
    path = tmp_path / "changed.json"
    path.write_text(json.dumps(data))
    text = refused(
        capsys, "generate", NOAH, "--backend", "cpu", "--prompt", "x", "--plan", str(path)
    )
    assert "the plan is refused" in text


def test_plan_of_another_model_is_refused(
    tmp_path: Path, plan_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = make_checkpoint(tmp_path / "other")
    capsys.readouterr()
    argv = ["generate", str(other), "--backend", "cpu", "--prompt", "x", "--plan", str(plan_file)]
    assert "the plan does not match this checkpoint" in refused(capsys, *argv)


def test_debug_shows_the_traceback() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ark", "plan", NOAH, "--debug"], capture_output=True, text=True
    )
    assert "Traceback" in done.stderr and "InvalidUsageError" in done.stderr


def test_no_compiler_is_one_paragraph(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from ark_cpu import compiler

    monkeypatch.setenv("ARK_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compiler, "find_compiler", lambda: None)
    argv = ["generate", NOAH, "--backend", "cpu", "--prompt", "x"]
    assert "no C++ compiler was found" in refused(capsys, *argv)
