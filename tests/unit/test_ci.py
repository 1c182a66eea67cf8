"""The generated CI files contain exactly what the matrix and the result files define."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from tests.cases.ci import compilers, evidence, generate, wheels

RESULT: dict[str, Any] = {
    "row": "cuda-h100",
    "backend": "cuda",
    "arch": "sm_90a",
    "date": "2026-01-31",
    "source": "0123456789abcdef",
    "system": "Linux x86_64",
    "python": "3.12.3",
    "devices": ["NVIDIA H100 80GB HBM3"],
    "versions": {"driver": "13.0"},
    "packages": {"cuda-python": "13.4.4"},
    "on_device": 2,
    "total": {"passed": 3, "failed": 0, "skipped": 1},
    "files": {
        "tests/backend/test_ops": {"passed": 2, "failed": 0, "skipped": 1},
        "tests/codegen/test_cuda_bodies": {"passed": 1, "failed": 0, "skipped": 0},
    },
}


def proofs(folder: Path) -> dict[str, str]:
    return {row["name"]: row["proof"] for row in generate.rows(folder)}


def test_generated_files_are_up_to_date() -> None:
    for path, text in generate.outputs().items():
        assert path.read_text() == text, f"run `python ci/generate.py` ({path.name})"


def test_every_row_has_a_job_and_a_line() -> None:
    matrix = generate.rows()
    workflow = generate.changes(matrix) + generate.devices(matrix)
    table = generate.coverage(matrix)
    for row in matrix:
        assert f"nox -s {row['name']}\n" in workflow
        assert f"`{row['name']}`" in table


def test_only_a_result_file_makes_hardware_executed(tmp_path: Path) -> None:
    before = proofs(tmp_path)
    assert [name for name, proof in before.items() if proof == "executed"] == ["cpu"]
    assert before["rocm-mi300x"] == "emulated" and before["cuda-h100"] == "compiled"
    (tmp_path / "cuda-h100.json").write_text(json.dumps(RESULT))
    assert proofs(tmp_path) == {**before, "cuda-h100": "executed"}
    (line,) = (r["evidence"] for r in generate.rows(tmp_path) if r["name"] == "cuda-h100")
    for word in ("2026-01-31", "3 passed, 1 skipped", "2 of them on NVIDIA H100", "13.4.4"):
        assert word in line


def test_further_runs_of_a_row_are_listed_as_evidence(tmp_path: Path) -> None:
    newer = {**RESULT, "packages": {"cuda-python": "13.5.0"}}
    (tmp_path / "cuda-h100.json").write_text(json.dumps(RESULT))
    (tmp_path / "cuda-h100+cuda-13.5.json").write_text(json.dumps(newer))
    (line,) = (r["evidence"] for r in generate.rows(tmp_path) if r["name"] == "cuda-h100")
    assert line.count("3 passed, 1 skipped") == 2
    assert line.index("cuda-python 13.4.4") < line.index("cuda-python 13.5.0")


def change(path: str, value: Any) -> dict[str, Any]:
    result = copy.deepcopy(RESULT)
    *outer, last = path.split(".")
    place = result
    for word in outer:
        place = place[word]
    if value is None:
        del place[last]
    else:
        place[last] = value
    return result


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("date", "yesterday", "date"),
        ("source", None, "source"),
        ("devices", [], "devices"),
        ("devices", ["a | b"], "devices"),
        ("on_device", 0, "on_device"),
        ("on_device", 4, "add up"),
        ("total.passed", 4, "add up"),
        ("total.passed", -1, "passed"),
        ("note", "all is well", "note"),
        ("row", "cuda-a100", "differ in name"),
        ("arch", "sm_80", "differ in arch"),
        ("devices", ["NVIDIA H200"], "H200"),
        ("backend", "rocm", "differ in backend"),
    ],
)
def test_result_that_does_not_fit_is_refused(
    tmp_path: Path, path: str, value: Any, words: str
) -> None:
    (tmp_path / "cuda-h100.json").write_text(json.dumps(change(path, value)))
    with pytest.raises(ValueError, match=words):
        generate.rows(tmp_path)


def test_failed_runs_and_other_devices_are_not_accepted(tmp_path: Path) -> None:
    failed = change("files.tests/backend/test_ops.failed", 1)
    failed["total"]["failed"] = 1
    (tmp_path / "cuda-h100.json").write_text(json.dumps(failed))
    with pytest.raises(ValueError, match="1 tests failed"):
        generate.rows(tmp_path)
    (tmp_path / "cuda-h100.json").unlink()
    (tmp_path / "cuda-x.json").write_text(json.dumps(RESULT))
    with pytest.raises(ValueError, match=r"not in ci/matrix\.toml"):
        generate.rows(tmp_path)


REPORT = """<testsuites><testsuite>
<testcase classname="tests.backend.test_ops" name="test_add[cpu-1]"/>
<testcase classname="tests.backend.test_ops" name="test_add[cuda-1]"/>
<testcase classname="tests.backend.test_ops" name="test_add[rocm-1]"><skipped/></testcase>
<testcase classname="tests.codegen.test_cuda_bodies" name="test_all"/>{}
</testsuite></testsuites>"""


def test_counts_are_those_of_pytests_report(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(REPORT.format(""))
    files, on_device = evidence.count([report], "cuda")
    assert on_device == 2
    assert evidence.add(files.values()) == evidence.Counts(3, 0, 1)
    bad = '<testcase classname="tests.backend.test_ops" name="test_b[cuda]"><error/></testcase>'
    report.write_text(REPORT.format(bad))
    files, on_device = evidence.count([report], "cuda")
    assert on_device == 2 and files["tests/backend/test_ops"] == evidence.Counts(2, 1, 1)


def test_run_writes_a_file_that_is_read_back(tmp_path: Path) -> None:
    """The result file of a test run can be read back. A run that executed no tests writes
    no file.
    """
    assert evidence.main(["cpu", "--output", str(tmp_path), "--no-such-option"]) != 0
    assert not list(tmp_path.iterdir())
    row = next(r for r in generate.rows() if r["name"] == "cpu")
    report = tmp_path / "report.xml"
    report.write_text(REPORT.format(""))
    result = evidence.describe(row, [report])
    assert result.on_device == 1 and result.devices and result.total.passed == 3
    (tmp_path / "cpu.json").write_bytes(evidence.msgspec.json.encode(result))
    assert evidence.read(tmp_path / "cpu.json") == result
    with pytest.raises(ValueError, match="this machine has"):
        evidence.describe({**row, "arch": "sm_90a"}, [report])


def test_row_may_run_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports of the same source are combined. A part that fails or is cut off is run again."""
    first = REPORT.format("")
    second = """<testsuites><testsuite>
<testcase classname="tests.backend.test_ops" name="test_add[cpu-1]"/>
<testcase classname="tests.backend.test_ops" name="test_b[cpu]"/></testsuite></testsuites>"""
    bad = '<testcase classname="a.b" name="c"><failure/></testcase>'
    parts = iter([(first, 0), (REPORT.format(bad), 1), (second, 2), (second, 0)])

    def run(row: object, report: Path, rest: list[str]) -> int:
        text, code = next(parts)
        report.write_text(text)
        return code

    monkeypatch.setattr(evidence, "_run", run)
    words = ["cpu", "--output", str(tmp_path / "out"), "--reports", str(tmp_path / "reports")]
    assert [evidence.main(words) for _ in range(4)] == [0, 1, 2, 0]
    result = evidence.read(tmp_path / "out/cpu.json")
    assert result.total == evidence.Counts(4, 0, 1) and result.on_device == 2


def test_compiler_is_forced_into_its_process(tmp_path: Path) -> None:
    folder = tmp_path / "13.0.88/nvidia/lib"
    with pytest.raises(ValueError, match="lacks libnvrtc"):
        compilers.forced(tmp_path)
    folder.mkdir(parents=True)
    for name in ("libnvrtc.so.13", "libnvrtc-builtins.so.13.0"):
        (folder / name).touch()
    environment = compilers.forced(tmp_path / "13.0.88")
    builtins, library = environment["LD_PRELOAD"].split(":")
    assert builtins.endswith("/libnvrtc-builtins.so.13.0") and library.endswith("/libnvrtc.so.13")
    assert environment["LD_LIBRARY_PATH"].split(":")[0] == str(folder)


def test_wheels_are_those_that_pyproject_names() -> None:
    wanted = wheels.requirements(["cuda", "test"], ["torch"])
    names = [word.split(">")[0].split("=")[0] for word in wanted]
    assert {"numpy", "cuda-python", "pytest"} <= set(names) and "torch" not in names
    everything = wheels.requirements(["dev"], [])
    assert set(wanted) < set(everything) and not any("ark-gpu" in w for w in everything)
    with pytest.raises(ValueError, match="the extra 'gpu' does not exist"):
        wheels.requirements(["gpu"], [])


SUITE: dict[str, Any] = {
    "suite": "a suite",
    "version": "1.0",
    "backend": "cpu",
    "device": "a processor",
    "emulated": False,
    "date": "2026-01-31",
    "source": "0123456789abcdef",
    "system": "Linux x86_64",
    "python": "3.12.3",
    "packages": {},
    "tests": 10,
    "selection": "all",
    "counts": {"passed": 6, "refused": 2, "refused_otherwise": 1, "wrong": 1, "crashed": 0},
}


def test_suite_s_counts_are_in_the_table(tmp_path: Path) -> None:
    (tmp_path / "s.json").write_text(json.dumps(SUITE))
    assert "| 10 of 10 | 6 | 3 | 1 |" in generate.suites(tmp_path)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("tests", 11, "do not add up"),
        ("selection", "9 tests", "do not add up"),
        ("date", "today", "not a suite's result"),
        ("counts", {**SUITE["counts"], "crashed": 1, "passed": 5}, "crashed"),
    ],
)
def test_invalid_result_file_of_a_suite_is_refused(
    tmp_path: Path, key: str, value: object, message: str
) -> None:
    (tmp_path / "s.json").write_text(json.dumps({**SUITE, key: value}))
    with pytest.raises(ValueError, match=message):
        generate.suites(tmp_path)
