"""Files, folders, links, commands and options that pages name must exist."""

from __future__ import annotations

import argparse
import fnmatch
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from ark.cli import COMMANDS, build_parser

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("ark", "backends", "bench", "ci", "docs", "examples", "tests")
NAMED = re.compile(rf"(?<![\w./-])((?:{'|'.join(FOLDERS)})/[\w./*-]*[\w*/])")
NEW = re.compile(r"^```python\n# (ark/[\w/]+\.py)$", re.M)
WRITTEN = ("ci/results/ROW.json", "ci/results/figures/ROW.json")
LINK = re.compile(r"\]\(([^)#\s]+)")
TEST = re.compile(r"`((?:\w+/)*test_\w+\.py)`")
# Tests of microsoft/ark, which docs/ark-interface.md compares.
OF_ARK = ("python/unittest/", "test_sendrecv.py")
COMMAND = re.compile(r"`(?:python -m )?ark ([^`]+)`")


def _tracked() -> list[str]:
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("only a checkout knows which files belong to it")
    return done.stdout.split()


@cache
def _paths() -> frozenset[str]:
    """Returns all files of the repository, and all folders that contain one."""
    files = _tracked()
    folders = {str(above) for file in files for above in Path(file).parents}
    return frozenset({*files, *folders})


def _pages(history: bool = False) -> list[Path]:
    """Returns all pages. history: includes docs/history, which may name files that no
    longer exist.
    """
    pages = (file for file in _tracked() if file.endswith(".md"))
    return [ROOT / file for file in pages if history or not file.startswith("docs/history")]


def _matches(page: Path, pattern: re.Pattern[str]) -> Iterator[tuple[str, str]]:
    """Yields the matches of a pattern on a page, each with its place as PAGE:LINE."""
    text = page.read_text()
    for match in pattern.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        yield f"{page.relative_to(ROOT)}:{line}", match[1]


def _exists(name: str) -> bool:
    return any(fnmatch.fnmatch(path, name.rstrip("/")) for path in _paths())


def test_files_and_folders_that_pages_name_exist() -> None:
    named = [(at, name) for page in _pages() for at, name in _matches(page, NAMED)]
    # Excluded are placeholders for any file, and files that a page asks its reader to write.
    new = {name for page in _pages() for _, name in _matches(page, NEW)}
    asked = [(at, n) for at, n in named if "..." not in n and n not in (*WRITTEN, *new)]
    assert len(asked) > 400
    missing = [f"{at}: {name}" for at, name in asked if not _exists(name)]
    assert not missing, "\n".join(missing)


def test_files_that_pages_name_as_tests_exist() -> None:
    """Pages may omit the first folders of a test file's path."""
    named = [(at, name) for page in _pages() for at, name in _matches(page, TEST)]
    ours = [(at, name) for at, name in named if not name.startswith(OF_ARK)]
    assert len(ours) > 80
    paths = [f"/{path}" for path in _paths()]
    missing = [f"{at}: {n}" for at, n in ours if not any(p.endswith(f"/{n}") for p in paths)]
    assert not missing, "\n".join(missing)


def test_links_between_pages_lead_somewhere() -> None:
    links = [
        (p, at, to) for p in _pages(history=True) for at, to in _matches(p, LINK) if "://" not in to
    ]
    assert len(links) > 50
    missing = [f"{at}: {to}" for page, at, to in links if not (page.parent / to).exists()]
    assert not missing, "\n".join(missing)


def _subcommands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    results: dict[str, argparse.ArgumentParser] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            results |= action.choices
    return results


@cache
def _parser(name: str) -> argparse.ArgumentParser:
    return _subcommands(build_parser([name]))[name]


def _wrong(command: str) -> str:
    """Returns the error in a command on a page, which may be part of a command line,
    or "".
    """
    words = re.sub(r'"[^"]*"', "TEXT", command).replace("\\|", " ").split()
    if words[0] not in COMMANDS:
        return f"there is no command {words[0]!r}"
    parsers = [_parser(words[0])]
    parts = _subcommands(parsers[0])
    if parts and len(words) > 1 and words[1].isalpha():
        if words[1] not in parts:
            return f"`ark {words[0]}` has no {words[1]!r}"
        parsers = [parts[word] for word in words if word in parts]
    known = {option for parser in parsers for option in parser._option_string_actions}
    known |= {"--debug", "--log-level"}  # accepted at any position
    for option in re.findall(r"(?:^|[ \[])(--?[a-z][\w-]*)", " ".join(words[1:])):
        if option not in known:
            return f"no option {option}"
    return ""


def test_commands_that_pages_name_have_these_options() -> None:
    calls = [(at, call) for page in _pages() for at, call in _matches(page, COMMAND)]
    assert len(calls) > 100
    wrong = [f"{at}: ark {call}: {fault}" for at, call in calls if (fault := _wrong(call))]
    assert not wrong, "\n".join(wrong)


def _block_lines(page: Path) -> Iterator[tuple[str, str]]:
    """Yields the ark commands in a page's shell blocks, without `$`, variables and comments."""
    for kind, block in re.findall(r"```(bash|console)\n(.*?)```", page.read_text(), re.S):
        for line in block.replace("\\\n", " ").splitlines():
            if kind == "console" and not line.startswith("$ "):
                continue
            for part in re.split(r" && |; | \| ", line.removeprefix("$ ").split("  #")[0]):
                words = re.sub(r"^(\S+=\S*\s+)+", "", part.strip())
                words = re.sub(r"^\S*/ark ", "ark ", words)
                if words.startswith("ark "):
                    yield f"{page.relative_to(ROOT)}", words[4:].split(" > ")[0]


def test_commands_in_blocks_of_pages_have_these_options() -> None:
    calls = [call for page in _pages() for call in _block_lines(page)]
    assert len(calls) > 40
    wrong = [f"{at}: ark {call}: {fault}" for at, call in calls if (fault := _wrong(call))]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("command", "fault"),
    [
        ("toppo show NET", "no command 'toppo'"),
        ("topo discover", "has no 'discover'"),
        ("plan DIR --machin h100", "no option --machin"),
        ('generate DIR --prompt "--no-such"', ""),
        ("topo show\\|optimal NET --json", ""),
    ],
)
def test_unknown_command_is_reported(command: str, fault: str) -> None:
    assert fault in _wrong(command) and bool(fault) == bool(_wrong(command))


def test_layers_of_the_page_are_those_that_lint_checks() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contracts = project["tool"]["importlinter"]["contracts"]
    (layers,) = (c["layers"] for c in contracts if c["type"] == "layers")
    page = (ROOT / "docs/architecture.md").read_text()
    block = page.split("## The layers")[1].split("```")[1].strip().splitlines()
    written = [re.split(r" {2,}", line)[0].split(" | ") for line in block]
    assert written == [layer.split(" | ") for layer in layers]


def _text(module: str) -> str:
    """Returns the source of a module of ark, or of all modules of a package; "" if there is
    none.
    """
    path = ROOT / module.replace(".", "/")
    files = [path.with_suffix(".py")] if path.with_suffix(".py").exists() else path.rglob("*.py")
    return "".join(file.read_text() for file in files)


def test_modules_named_as_callers_use_the_module() -> None:
    callers_named = []
    for path in sorted((ROOT / "ark").rglob("*.py")):
        opening = path.read_text().split('"""', 2)[1:2]
        for callers in re.findall(r"Called by (.*?)(?:[;(]|\.(?:\s|$))", "".join(opening), re.S):
            name = path.parent.name if path.stem == "__init__" else path.stem
            callers_named += [(path, name, by) for by in re.findall(r"\bark(?:\.\w+)+", callers)]
    assert len(callers_named) > 60
    wrong = [
        f"{path.relative_to(ROOT)}: {by} does not name {name}"
        for path, name, by in callers_named
        if not re.search(rf"\b{name}\b", _text(by))
    ]
    assert not wrong, "\n".join(wrong)
