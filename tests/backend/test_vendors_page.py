"""docs/vendors.md and docs/kernel-variants.md followed literally: the backend and the
variant run.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
VENDOR, VARIANT = ((ROOT / f"docs/{n}.md").read_text() for n in ("vendors", "kernel-variants"))
FILE = re.compile(r"^`([\w/.]+)`:\n\n```\w+\n(.*?)^```", re.M | re.S)


def write(section: str, folder: Path) -> None:
    """Writes the files of a section, and the package metadata that pip would write."""
    for name, text in FILE.findall(section):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    info = folder / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Name: {project['name']}\nVersion: {project['version']}\n")
    points = project["entry-points"]["ark.backends"]
    lines = "".join(f"{key} = {value}\n" for key, value in points.items())
    (info / "entry_points.txt").write_text(f"[ark.backends]\n{lines}")


def run(folder: Path, *words: str) -> str:
    path = os.pathsep.join([str(folder), *sys.path])
    done = subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def vendor(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vendor")
    write(VENDOR, folder)
    return folder


def test_vendor_of_the_page_runs(vendor: Path) -> None:
    assert "toy" in run(vendor, "-m", "ark", "info")
    run(vendor, str(vendor / "try_vendor.py"))


def test_specialised_body_of_the_page_is_used(vendor: Path) -> None:
    """If the matmul body (device function) that the page defines is changed to compute a wrong
    result, the page's script fails; this proves that the script uses it.
    """
    refused(vendor, "ark_toy/tasks/matmul.h", "ark_row_dot(right, left, K)", "try_vendor.py")


def test_variant_of_the_page_runs(tmp_path: Path) -> None:
    write(VENDOR, tmp_path)
    write_variant(tmp_path)
    run(tmp_path, str(tmp_path / "try_variant.py"))
    run(tmp_path, str(tmp_path / "try_vendor.py"))
    refused(tmp_path, "ark_toy/stream.h", "fetch.bytes", "try_variant.py")


def refused(folder: Path, file: str, part: str, script: str) -> None:
    """Asserts that the script fails if a part of the device code is replaced by 0."""
    path = folder / file
    text = path.read_text()
    assert part in text
    try:
        path.write_text(text.replace(part, "0"))
        with pytest.raises(AssertionError, match=r"assert .*\n(.*\n)?.*AssertionError"):
            run(folder, str(folder / script))
    finally:
        path.write_text(text)


def write_variant(folder: Path) -> None:
    """Writes the section's files and applies its change to machines.py."""
    (changed,) = re.findall(r"`model` becomes:\n\n```python\n(.*?)^```", VARIANT, re.M | re.S)
    imports, definitions = changed.split("\n\n", 1)
    machines = folder / "ark_toy/machines.py"
    text = machines.read_text()
    begin, end = text.index("def model"), text.index("def by_name")
    text = text[:begin] + definitions + "\n\n" + text[end:]
    machines.write_text(
        text.replace("from ark_cpu import machines\n", f"{imports}\nfrom ark_cpu import machines\n")
    )
    write(VARIANT, folder)
