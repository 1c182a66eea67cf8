"""`--machine FILE.json`: a user's machine model, checked before it is used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ark.backend import machine_files, registry
from ark.cli import main
from ark.errors import InvalidUsageError
from ark.plan.schema import read_machine


def _entry(name: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["info", "--machine", name]) == 0
    entry: dict[str, Any] = json.loads(capsys.readouterr().out)
    return entry


def _write(folder: Path, entry: object) -> str:
    path = folder / "my.json"
    path.write_text(json.dumps(entry))
    return str(path)


@pytest.mark.parametrize("name", ["h200", "mi300x", "cpu-2"])
def test_printed_machine_is_the_named_one(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = _write(tmp_path, _entry(name, capsys))
    assert machine_files.machine(path) == registry.machine(name) == machine_files.machine(name)


def test_plan_is_made_for_the_machine_in_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    entry = _entry("cpu-2", capsys)
    path = _write(tmp_path, entry | {"name": "own", "processors": 3})
    command = ["plan", "llama-3.2-1b", "--machine", path, "--context", "16", "--chunk", "0"]
    assert main([*command, "-o", str(tmp_path / "plan.json")]) == 0
    planned = read_machine(json.loads((tmp_path / "plan.json").read_text())["machine"])
    assert (planned.name, planned.processors) == ("own", 3)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"processors": 0}, "processors"),
        ({"processors": "many"}, "processors"),
        ({"capabilities": ["wgma"]}, "the capability 'wgma' does not exist"),
        ({"costs": {"signal_us": -1.0}}, "signal_us"),
        ({"costs": {"speed": 1.0}}, "no field 'speed'"),
        ({"colour": 1}, "colour"),
        ({"variants": []}, "no kernel variant"),
        ({"arch": "sm_90a; rm -rf /"}, "arch"),
        ({"backend": "abacus"}, "'abacus' is not installed"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_wrong_machine_is_refused(
    change: dict[str, Any], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = _write(tmp_path, _entry("cpu-2", capsys) | change)
    with pytest.raises(InvalidUsageError, match=reason):
        machine_files.machine(path)


@pytest.mark.parametrize(
    "text", [b"", b"[1]", b"{", b"\xff", b"[" * 5000, b" " * (1 << 20) + b"{}"]
)
def test_other_contents_are_refused(text: bytes, tmp_path: Path) -> None:
    path = tmp_path / "my.json"
    path.write_bytes(text)
    with pytest.raises(InvalidUsageError, match=r"the machine file .*my\.json"):
        machine_files.machine(str(path))


def test_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "folder.json"
    folder.mkdir()
    for path in (tmp_path / "none.json", folder):
        with pytest.raises(InvalidUsageError, match="cannot be read"):
            machine_files.machine(str(path))


def test_plan_names_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A plan contains its machine's description. The machine's name in it is looked up among the
    installed machine models only and is never opened as a file.
    """
    path = _write(tmp_path, _entry("cpu-2", capsys))
    with pytest.raises(InvalidUsageError, match="does not exist"):
        registry.machine(path)
