"""What a project has beside its code: types, forms, hooks and workflows that fit the rest."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import Any

import yaml

import ark
from tests.cases.ci import generate

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def read(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text())


def test_every_package_of_the_wheel_says_that_it_has_types() -> None:
    packages = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert len(packages) == 6
    assert [p for p in packages if not (ROOT / p / "py.typed").is_file()] == []
    assert "Typing :: Typed" in PROJECT["project"]["classifiers"]


def test_the_citation_is_of_this_version() -> None:
    about = read("CITATION.cff")
    assert (about["version"], about["license"]) == (ark.__version__, "MIT")
    assert about["authors"] and about["cff-version"] == "1.2.0"


def test_forms_have_labels_and_distinct_fields() -> None:
    for name in ("bug", "request"):
        form = read(f".github/ISSUE_TEMPLATE/{name}.yml")
        assert form["name"] and form["description"]
        names = [field["id"] for field in form["body"]]
        assert len(set(names)) == len(names) and all(f["attributes"]["label"] for f in form["body"])


def _lint() -> list[list[str]]:
    """The words of each command of the lint session, its literal ones."""
    tree = ast.parse((ROOT / "noxfile.py").read_text())
    lint = next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "lint")
    calls = [n for n in ast.walk(lint) if isinstance(n, ast.Call)]
    runs = [c for c in calls if isinstance(c.func, ast.Attribute) and c.func.attr == "run"]
    return [[str(a.value) for a in call.args if isinstance(a, ast.Constant)] for call in runs]


def test_the_hooks_are_the_commands_of_the_lint_session() -> None:
    (local,) = read(".pre-commit-config.yaml")["repos"]
    assert local["repo"] == "local"
    hooks = sorted(hook["entry"] for hook in local["hooks"])
    assert hooks == sorted(" ".join(words) for words in _lint())


def test_no_change_waits_for_a_runner_that_may_not_be_there() -> None:
    for path in sorted((ROOT / ".github/workflows").glob("*.yml")):
        parsed = yaml.load(path.read_text(), yaml.BaseLoader)
        needs = [job for job in parsed["jobs"].values() if "self-hosted" in job["runs-on"]]
        assert not needs or list(parsed["on"]) == ["workflow_dispatch"], path.name
        if needs:
            rows = parsed["on"]["workflow_dispatch"]["inputs"]["row"]["options"]
            assert list(parsed["jobs"]) == rows
            assert all(
                job["if"] == f"inputs.row == '{name}'" for name, job in parsed["jobs"].items()
            )
    known = [row["name"] for row in generate.rows() if row["runner"][0] == "self-hosted"]
    assert known == rows


def test_the_changelog_has_three_headings() -> None:
    lines = (ROOT / "CHANGELOG.md").read_text().splitlines()
    assert [line[4:] for line in lines if line.startswith("### ")] == ["Added", "Changed", "Fixed"]
