"""Each test is in exactly one of two parts (default, long); tests/long.txt is up to date."""

from __future__ import annotations

import ast
import json
import os
import runpy
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from tests import long
from tests.cases.ci import load

ROOT = Path(__file__).resolve().parents[2]
durations = load("durations")


@cache
def names_in(file: str) -> set[str]:
    """The functions and module variables of a test file. A variable may be a class of tests."""
    tree = ast.parse((ROOT / file).read_text())
    functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    targets = (node.targets for node in tree.body if isinstance(node, ast.Assign))
    return functions | {name.id for (name, *_) in targets if isinstance(name, ast.Name)}


def collected(*words: str) -> list[str]:
    """The tests that a run has, as pytest finds them."""
    command = (sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider")
    given = {**os.environ, "PYTEST_ADDOPTS": ""}  # -v there would list the tests in another form
    done = subprocess.run([*command, *words], capture_output=True, text=True, cwd=ROOT, env=given)
    assert done.returncode == 0, done.stdout + done.stderr
    return sorted(line for line in done.stdout.splitlines() if "::" in line)


def test_every_test_is_in_one_of_two_runs() -> None:
    """Every test of a small folder with long tests is in either the default or the long part, and
    all are in a run with the folder's path.
    """
    folders = {file.rpartition("/")[0] for file in long.files() if file.count("/") == 3}
    folder = min(sorted(folders), key=lambda name: len([*(ROOT / name).rglob("test_*.py")]))
    without_paths = ("-o", f"testpaths={folder}")
    default, others = collected(*without_paths), collected(*without_paths, "--part", "long")
    assert default and others
    assert sorted([*default, *others]) == collected(*without_paths, "--part", "all")
    assert sorted([*default, *others]) == collected(folder)


def test_ci_runs_both_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("nox")
    monkeypatch.chdir(ROOT)  # noxfile.py reads ci/matrix.toml
    sessions = SimpleNamespace(**runpy.run_path("noxfile.py"))
    assert {"tests", "long_tests"} <= {*sessions.nox.options.sessions}
    assert (ROOT / ".ci/run").read_text().endswith(".venv/bin/nox\n")

    def words(function: Any, *posargs: str) -> tuple[str, ...]:
        """Returns the last command that a nox session runs."""
        session = Mock(posargs=[*posargs])
        function.func(session)
        return tuple(session.run.call_args.args)

    default, nested = words(sessions.tests), words(sessions.long_tests)
    assert default[0] == "pytest" and "--part" not in default
    assert not {"-k", "-m", "tests"} & {*default}
    assert nested[-5:] == ("-s", "tests", "--", "--part", "long")
    beside = words(sessions.tests, "--part", "long")
    assert beside[1] == "ci/emulated.py" and len(json.loads(beside[2])) > 2
    assert beside[3] == "pytest" and beside[-2:] == ("--part", "long")
    assert not {"-k", "-m", "tests"} & {*beside}


def test_new_test_is_in_the_default_run() -> None:
    assert long.part_of("tests/unit/test_new.py::test_new[1-a::b]") == long.DEFAULT
    for name in long.listed():
        assert long.part_of(f"{name}_too") == long.DEFAULT
        assert long.part_of(f"{name}[case-1]") == long.part_of(name) == long.LONG


def test_long_tests_exist() -> None:
    names = (ROOT / "tests/long.txt").read_text().split()
    assert names == sorted(set(names))
    missing = [name for name in names if name.split("::")[1] not in names_in(name.split("::")[0])]
    assert missing == [], "run `python ci/durations.py`, or remove these lines"


def test_longest_cases_leave_the_default_run(tmp_path: Path) -> None:
    file = "tests/unit/test_ci_durations.py"
    classname = file.removesuffix(".py").replace("/", ".")
    cases = {"short": 10 * [1.0], "more": [3.0, 1.0], "most": [6.0], "few": [4.0, 0.0]}
    report = tmp_path / "report.xml"
    text = "".join(
        f'<testcase classname="{classname}" name="{name}[{number}]" time="{seconds}">'
        f"{'' if seconds else '<skipped/>'}</testcase>"
        for name, times in cases.items()
        for number, seconds in enumerate(times)
    )
    report.write_text(f"<testsuites><testsuite>{text}</testsuite></testsuites>")
    seconds = durations.functions([report])
    assert seconds[f"{file}::few"] == [4.0]
    assert seconds[f"{file}::short"] == 10 * [1.0]
    listed = [durations.longest(seconds, share) for share in (1, 0.7, 0.5, 0.4)]
    names = [[name.partition("::")[2] for name in names] for names in listed]
    assert names == [[], ["few", "most"], ["few", "more", "most"], ["few", "more", "most", "short"]]


def test_report_of_another_project_is_refused(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(
        '<testsuites><testcase classname="tests.none" name="a" time="1"/></testsuites>'
    )
    with pytest.raises(ValueError, match=r"a test of tests\.none, which does not exist"):
        durations.functions([report])
