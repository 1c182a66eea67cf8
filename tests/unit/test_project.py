"""The files of the project beside its code: type marker, templates, hooks and workflows agree with
the code.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hatchling.builders.wheel import WheelBuilder

import ark
from tests.cases.ci import generate, load

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def read(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text())


def _files_of_wheel(root: Path) -> set[str]:
    return {file.distribution_path for file in WheelBuilder(str(root)).recurse_included_files()}


def test_emulator_is_a_distribution_of_its_own() -> None:
    emulator = ROOT / "backends/rocm_emulator"
    project = tomllib.loads((emulator / "pyproject.toml").read_text())["project"]
    assert project["version"] == ark.__version__
    ours, theirs = _files_of_wheel(ROOT), _files_of_wheel(emulator)
    assert {name.partition("/")[0] for name in theirs} == {"ark_rocm_emulator"}
    assert {"ark_rocm_emulator/core/README.md", "ark_rocm_emulator/py.typed"} <= theirs
    assert "ark_rocm/probe.py" in ours and not ours & theirs


def test_every_package_of_the_wheel_says_that_it_has_types() -> None:
    packages = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert len(packages) == 5
    assert [p for p in packages if not (ROOT / p / "py.typed").is_file()] == []
    assert "Typing :: Typed" in PROJECT["project"]["classifiers"]


def test_citation_is_of_this_version() -> None:
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
    """Returns the words of each command that noxfile.py runs in the lint session, as far as they
    are literals.
    """
    tree = ast.parse((ROOT / "noxfile.py").read_text())
    lint = next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "lint")
    calls = [n for n in ast.walk(lint) if isinstance(n, ast.Call)]
    runs = [c for c in calls if isinstance(c.func, ast.Attribute) and c.func.attr == "run"]
    return [[str(a.value) for a in call.args if isinstance(a, ast.Constant)] for call in runs]


def test_hooks_are_the_commands_of_the_lint_session() -> None:
    (local,) = read(".pre-commit-config.yaml")["repos"]
    assert local["repo"] == "local"
    hooks = sorted(hook["entry"] for hook in local["hooks"])
    assert hooks == sorted(" ".join(words) for words in _lint())


def test_workflows_of_changes_use_hosted_runners_only() -> None:
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


def test_tag_is_released_with_the_notes_of_its_version(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    release = load("release")
    notes = tmp_path / "notes.md"
    assert release.main([f"v{ark.__version__}", str(notes)]) == 0
    assert notes.read_text().startswith("### Added\n\n- ")
    assert [line for line in notes.read_text().splitlines() if line.startswith("## ")] == []
    assert release.main(["v9.9.9"]) == 1
    assert "the tag is v9.9.9, but the version is" in capsys.readouterr().err
    for text in ("", "## 1.0.0 (unreleased)\n\n- x\n", "## 1.0.0 - 2026-01-02\n\nText.\n"):
        with pytest.raises(ValueError, match=r"no entries under `## 1\.0\.0 - YYYY-MM-DD`"):
            release.notes(text, "1.0.0")
    text = "## Unreleased\n\n- a\n\n## 1.0.0 - 2026-01-02\n\n- b\n\n## 0.9.0 - 2026-01-01\n\n- c\n"
    assert release.notes(text, "1.0.0") == "- b\n"


def test_unreleased_entries_are_cut_into_the_version() -> None:
    release = load("release")
    text = "# Changelog\n\n## Unreleased\n\n### Added\n\n- b\n\n### Fixed\n\n- f\n\n"
    text += "## 1.0.0 - 2026-01-02\n\n### Added\n\n- a\n\n## 0.9.0 - 2026-01-01\n\n- c\n"
    cut = release.cut(text, "1.0.0", "2026-02-03")
    assert release.notes(cut, "1.0.0") == "### Added\n\n- b\n- a\n\n### Fixed\n\n- f\n"
    assert "\n## Unreleased\n\n## 1.0.0 - 2026-02-03\n" in cut
    assert release.notes(cut, "0.9.0") == "- c\n"
    assert release.cut(cut, "1.0.0", "2026-02-03") == cut
    new = release.cut(text, "1.1.0", "2026-02-03")
    assert [release.notes(new, v) for v in ("1.1.0", "1.0.0")] == [
        "### Added\n\n- b\n\n### Fixed\n\n- f\n",
        "### Added\n\n- a\n",
    ]


def test_release_workflow_builds_tests_and_checks_the_tag() -> None:
    parsed = yaml.load((ROOT / ".github/workflows/release.yml").read_text(), yaml.BaseLoader)
    assert parsed["on"] == {"push": {"tags": ["v*"]}}
    (job,) = parsed["jobs"].values()
    runs = [step.get("run", "") for step in job["steps"]]
    (check,) = (at for at, run in enumerate(runs) if "ci/release.py" in run)
    (build,) = (at for at, run in enumerate(runs) if run.endswith("nox -s package"))
    assert check < build < len(runs) - 1 and "gh release create" in runs[-1]


def test_dockerfiles_and_the_devcontainer_install_existing_extras() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    container = json.loads((ROOT / ".devcontainer/devcontainer.json").read_text())
    texts = [container["postCreateCommand"]]
    texts += [path.read_text() for path in sorted((ROOT / "docker").glob("*.Dockerfile"))]
    assert len(texts) == 4
    for text in texts:
        (asked,) = re.findall(r"\.\[([\w,]+)\]", text)
        assert set(asked.split(",")) <= set(extras)


def test_versions_in_the_changelog_have_three_headings_at_most() -> None:
    _, *versions = (ROOT / "CHANGELOG.md").read_text().split("\n## ")
    assert versions
    for version in versions:
        headings = [line[4:] for line in version.splitlines() if line.startswith("### ")]
        assert headings == [h for h in ("Added", "Changed", "Fixed") if h in headings]


def test_each_distribution_has_a_description_for_the_index() -> None:
    emulator = tomllib.loads((ROOT / "backends/rocm_emulator/pyproject.toml").read_text())
    assert len(emulator["project"]["readme"]["text"]) > 40
    assert "readme" in PROJECT["project"]["dynamic"]  # hatch_build.py derives it from README.md
    package = ast.unparse(ast.parse((ROOT / "noxfile.py").read_text()))
    assert "session.run('twine', 'check', '--strict', *built, emulator)" in package
